"""How long tensors and the autograd graph of a step live."""

import contextlib
import gc

import torch
from torch.autograd.graph import get_gradient_edge

RECIPES = "bf16", "fp8_block", "fp8_tensor", "mxfp8"


@contextlib.contextmanager
def cycles():
    """The tensors that only cycles of references keep after the block, in a list that is then filled."""
    found, flags = [], gc.get_debug()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.garbage.clear()
        gc.collect()
        found += [tuple(t.shape) for t in gc.garbage if isinstance(t, torch.Tensor)]
    finally:
        gc.set_debug(flags)
        gc.garbage.clear()
        gc.enable()


def check_freed(forward, leaves, steps=2):
    """Check that no graph of ``forward``, which returns a tensor, is there after a backward pass. As long as one is,
    the leaves keep their nodes of it.
    """

    def marks():
        return [get_gradient_edge(leaf).node.metadata for leaf in leaves]

    def step():
        y = forward()
        for mark in marks():
            mark["step"] = True
        assert all("step" in mark for mark in marks())
        y.sum().backward()

    for _ in range(steps):
        step()
        gc.collect()
        assert not any("step" in mark for mark in marks())
