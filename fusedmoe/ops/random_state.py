"""The state of the random number generators, for ops that draw: what is computed again draws the same numbers again.

There are two: the generator of the CPU, and the default generator of the device that the rows are on.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fusedmoe.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fusedmoe.ops.op import Op

NAMES = ("random_state", "device_random_state")
"""What an op with ``draws_random`` calls the states that it drew from."""

States = tuple[Tensor, Tensor | None]


def _device_generator(device: torch.device) -> Any:
    """Return the module that has a device's generator; None where that is the CPU's, or there is none."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    return module if module.is_available() else None  # a fake tensor's device need not be there


def _which(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # of which there is one


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


def compute_noting_states(op: Op, x: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    """Return what an op computes, and the states that it has drawn from."""
    if _is_capturing(x):
        raise InputError(
            f"{op!r}: draws random numbers, which its backward pass draws again: expected a call outside of a CUDA "
            f"graph's capture, where the generator's state cannot be kept"
        )
    states = _states(x.device)
    out = op.compute(x, *args)
    return (*((out,) if isinstance(out, Tensor) else out), *states)


@contextmanager
def drawing_again(states: States | None, device: torch.device) -> Iterator[None]:
    """Draw from these states inside, if there are any; afterwards the generators are where they were."""
    if states is None:
        yield
        return
    now = _states(device)
    _set(states, device)
    try:
        yield
    finally:
        _set(now, device)


def compute_again(op: Op, x: Tensor, *args: Any) -> Any:
    """Return what an op computes with the states that come last."""
    *others, of_cpu, of_device = args
    with drawing_again((of_cpu, of_device), x.device):
        return op.compute(x, *others)


def compute_watched(op: Op, x: Tensor, *args: Any) -> Any:
    """Return what an op computes, and raise if it draws random numbers without saying so."""
    if type(x) not in (Tensor, nn.Parameter) or _is_capturing(x):
        return op.compute(x, *args)
    before = _states(x.device)
    out = op.compute(x, *args)
    if _same(before, _states(x.device)):
        return out
    # another thread may have drawn; and another drawing may give the same output
    with torch.no_grad(), _Draws(x.device) as draws:
        again = op.compute(x, *args)
    same = _same((out,) if isinstance(out, Tensor) else out, (again,) if isinstance(again, Tensor) else again)
    if draws.seen or not same:
        raise InputError(
            f"{op!r}: compute: draws random numbers, and would draw others where it is computed again: set "
            f"draws_random = True in the class"
        )
    return out


class _Draws(TorchDispatchMode):
    """Sees whether an operator that this thread runs draws: torch tags those that may."""

    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False
        self._device = device

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile what is inside."""
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
