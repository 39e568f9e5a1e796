"""Where the tests of the Hopper kernels run: on a GPU, or on an emulated one in CPU memory, if EMULATE_GPU is set."""

import os

import pytest
import torch

on_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
EMULATED = "EMULATE_GPU" in os.environ and not on_gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_hopper = pytest.mark.skipif(not (on_gpu or EMULATED), reason="needs an sm_90 GPU, or EMULATE_GPU=1")
needs_gpu = pytest.mark.skipif(not on_gpu, reason="needs an sm_90 GPU: streams, CUDA graphs or large tensors")


def capture(step, warm_ups=3):
    """A CUDA graph of a step, after so many warm-ups on a stream of their own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph
