"""The GPU: CUDA graphs and streams, which tests replace, and poisoned memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedmoe.base.target import arch_of
from fusedmoe.commands.doctor import driver

Results: TypeAlias = "dict[str, Tensor]"
"""The output of a call and its gradients, by name."""


class NoGpuError(Exception):
    """The machine has no GPU to verify; the message has the reason."""


class Gpu:
    """A GPU of this machine; ``arch`` is 90 for sm_90, and ``driver`` the version of its driver."""

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
        # Python may still hold autograd graphs of earlier calls, in cycles of references. Their nodes of the parameters
        # would sum gradients on the stream of those calls, and `torch.cuda.graph` does not collect them.
        gc.collect()
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
    """Return torch's current GPU. `NoGpuError` is raised if torch sees no NVIDIA GPU."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        raise NoGpuError("torch sees no NVIDIA GPU to verify; see `fusedmoe doctor`")
    return Gpu(torch.device("cuda", torch.cuda.current_device()))


# ---- memory whose content is NaN until it is written ----------------------------------------------------------------

_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
ALL_BITS = 255
"""The byte that fills new memory: NaN in every floating-point format of torch that has one, -1 in integers."""


class _Poison(TorchDispatchMode):
    """Fills what these operators return. Modes of torch functions are not active in a backward pass, this one is."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call: Callable[..., Any] = func
        result = call(*args, **(kwargs or {}))
        if func.namespace == "aten" and func.overloadpacket.__name__ in _ALLOCATES and isinstance(result, Tensor):
            as_bytes = torch.empty(0, dtype=torch.uint8, device=result.device)
            as_bytes.set_(result.untyped_storage()).fill_(ALL_BITS)
        return result


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill every tensor that Python code allocates uninitialized inside the block, also in the backward pass."""
    with _Poison():  # type: ignore[no-untyped-call]
        yield
