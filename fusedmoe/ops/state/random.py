"""The states of the random number generators, so that a recomputed op draws the same numbers again.

States come in pairs: of the CPU's generator, and of the default generator of the rows' device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fusedmoe.base.errors import InputError
from fusedmoe.base.estimating import has_values

NAMES = ("random_state", "device_random_state")  # the names of the saved states of an op with ``draws_random``

States = tuple[Tensor, Tensor | None]


def _device_generator(device: torch.device) -> Any:
    """Return the torch module that holds a device's generator; None for the CPU and for absent devices."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    return module if module.is_available() else None  # the device of a fake tensor may be absent


def _which(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # torch.mps has one device and takes no argument


def _states(device: torch.device) -> States:
    generator = _device_generator(device)
    of_device = None if generator is None else generator.get_rng_state(*_which(device))
    return torch.get_rng_state(), of_device


def _set(states: States, device: torch.device) -> None:
    of_cpu, of_device = states
    torch.set_rng_state(of_cpu)
    if of_device is not None:
        _device_generator(device).set_rng_state(of_device, *_which(device))


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def compute_noting_states(op: Any, x: Tensor, *args: Any, **keywords: bool) -> tuple[Tensor | None, ...]:
    """Return the outputs of an op, followed by the generator states before the call."""
    if _is_capturing(x):
        raise InputError(
            f"{op!r}: draws random numbers, and its backward pass draws the same again. CUDA graph capture cannot save "
            f"the generator's state: call the op outside of a capture"
        )
    states = _states(x.device)
    out = op.compute(x, *args, **keywords)
    return (*((out,) if isinstance(out, Tensor) else out), *states)


@contextmanager
def drawing_again(states: States | None, device: torch.device) -> Iterator[None]:
    """Set the generators to these states inside the block, and restore them afterwards; None changes nothing."""
    if states is None:
        yield
        return
    now = _states(device)
    _set(states, device)
    try:
        yield
    finally:
        _set(now, device)


@contextmanager
def drawing_nothing(x: Tensor) -> Iterator[None]:
    """Restore the generators after the block, for a device like that of x; not during a CUDA graph capture."""
    if _is_capturing(x) or not has_values(x):
        yield
        return
    now = _states(x.device)
    try:
        yield
    finally:
        _set(now, x.device)


def compute_again(op: Any, x: Tensor, *args: Any, **keywords: bool) -> Any:
    """Return the outputs of an op, computed with the generator states in the last two arguments."""
    *others, of_cpu, of_device = args
    with drawing_again((of_cpu, of_device), x.device):
        return op.compute(x, *others, **keywords)


def compute_watched(op: Any, x: Tensor, *args: Any, **keywords: bool) -> Any:
    """Return the outputs of an op; raise if it draws random numbers and does not declare ``draws_random``."""
    if type(x) not in (Tensor, nn.Parameter) or _is_capturing(x):
        return op.compute(x, *args, **keywords)
    before = _states(x.device)
    out = op.compute(x, *args, **keywords)
    if _same(before, _states(x.device)):
        return out
    # another thread may have drawn the numbers, and different numbers may give the same output
    with torch.no_grad(), _Draws(x.device) as draws:
        again = op.compute(x, *args, **keywords)
    same = _same((out,) if isinstance(out, Tensor) else out, (again,) if isinstance(again, Tensor) else again)
    if draws.seen or not same:
        raise InputError(
            f"{op!r}: compute: draws random numbers, and a recomputation would draw different ones: set "
            f"draws_random = True in the class"
        )
    return out


class _Draws(TorchDispatchMode):
    """Records whether an operator on this thread draws random numbers: one that torch tags and that changes a state."""

    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False
        self._device = device

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Allow torch to compile inside this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs or {})
        before = _states(self._device)
        out = func(*args, **kwargs or {})
        self.seen = self.seen or not _same(before, _states(self._device))
        return out


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all(x is y or torch.equal(x, y) for x, y in zip(a, b, strict=True))
