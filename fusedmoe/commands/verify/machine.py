"""The interface to the GPU: CUDA graphs and streams. Tests replace it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from fusedmoe.base.target import arch_of
from fusedmoe.commands.doctor import driver

__all__ = ["Gpu", "Machine", "NoGpuError", "Results", "find_gpu"]

Results: TypeAlias = "dict[str, Tensor]"
"""The output of a call and its gradients, by name."""


class NoGpuError(Exception):
    """The machine has no GPU to verify; the message has the reason."""


class Machine(Protocol):
    """A GPU to verify.

    Attributes
    ----------
    device
        The device of the tensors.
    arch
        The architecture, 90 for sm_90.
    name, driver
        The name of the GPU and the version of its driver.
    """

    device: torch.device
    arch: int
    name: str
    driver: str

    def replayed(self, call: Callable[[], Results]) -> Results:
        """Return the results of a call that a CUDA graph has captured, after a replay."""

    def on_two_streams(self, call: Callable[[], Results]) -> list[Results]:
        """Return the results of calls on two streams at once."""


class Gpu:
    """A GPU of this machine, as a `Machine`."""

    WARM_UPS = 2
    CALLS_PER_STREAM = 3

    def __init__(self, device: torch.device) -> None:
        arch = arch_of(device)
        assert arch is not None, "find_gpu has checked it"
        self.device, self.arch = device, arch
        self.name, self.driver = torch.cuda.get_device_name(device), driver()

    def replayed(self, call: Callable[[], Results]) -> Results:
        """Capture a call, overwrite its results with NaN, and replay it."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(self.WARM_UPS):
                call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call()
        for result in results.values():
            result.fill_(torch.nan)
        graph.replay()
        found = {name: result.clone() for name, result in results.items()}
        torch.cuda.synchronize(self.device)
        return found

    def on_two_streams(self, call: Callable[[], Results]) -> list[Results]:
        """Enqueue several calls on each of two streams, alternating, before the host waits for any."""
        streams = [torch.cuda.Stream(self.device) for _ in range(2)]
        torch.cuda.synchronize(self.device)
        found = []
        for _ in range(self.CALLS_PER_STREAM):
            for stream in streams:
                with torch.cuda.stream(stream):
                    found.append(call())
        torch.cuda.synchronize(self.device)
        return found


def find_gpu() -> Gpu:
    """Return torch's current GPU.

    Raises
    ------
    NoGpuError
        Torch sees no NVIDIA GPU.
    """
    if torch.version.hip is not None or not torch.cuda.is_available():
        raise NoGpuError("torch sees no NVIDIA GPU to verify; see `fusedmoe doctor`")
    return Gpu(torch.device("cuda", torch.cuda.current_device()))
