"""The cache of quantized weights: a weight is quantized again only after it may have changed.

The cache is an attribute of the layer, and holds the results of one quantizer. It is valid while all of these hold:

- The parameter has the same memory and the same version counter. Torch increments the counter for in-place writes:
  ``load_state_dict``, updates under ``torch.no_grad``, fused and foreach optimizers.
- No ``torch.optim`` optimizer has stepped. This covers optimizers that write through ``.data``, which torch does not
  count.
- No gradient of the parameter was removed, replaced, or changed in place except by accumulation.
- The parameter was not set on the module. FSDP2 sets it when it unshards and reshards; this also frees the cache.
- No process group of ``torch.distributed`` has run a collective on the weight's device, or was created or destroyed. A
  collective may write to the weight, and torch does not count this write.
- The CUDA stream is the same.

During CUDA graph capture the cache is neither read nor written, so that a graph quantizes in every replay. A layer that
was captured is not cached afterwards: a replay may change its weight without notice.

Other writes that torch does not count are not detected; ``docs/recipes.md`` lists them. The user must call
`clear_weight_cache` after such a write. With ``FUSEDMOE_DEBUG=1`` each use compares a checksum of the weight, and
raises an error if it differs.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from fusedmoe.checks import MODULE
from fusedmoe.environment import debugging
from fusedmoe.errors import InputError
from fusedmoe.process_state import HasProcessState

if TYPE_CHECKING:
    from fusedmoe.formats import QuantizedTensor, Quantizer
    from fusedmoe.ops.op import Op
    from fusedmoe.process_state import ProcessState

_DISTRIBUTED = dist.is_available()
_optimizer_steps = 0


def _count_step(*_: object) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


@functools.cache
def _watch_optimizers() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(_count_step)


@dataclass
class _Entry:
    # weak references to storages: while one is held, no other storage gets the same address. A weak reference to the
    # tensor would keep torch from swapping it.
    storage: StorageWeakRef  # of the parameter
    grad: StorageWeakRef | None  # of its gradient
    grad_version: float  # version counter of the gradient
    state: tuple[Any, ...]
    forms: dict[int, QuantizedTensor]  # by axis
    counted: bool  # whether delayed scaling has counted the weight as a step
    checksum: Tensor | None  # of the parameter, with FUSEDMOE_DEBUG
    maker: str  # the rule that made the forms; empty for plain PyTorch
    gradient_given: bool = False  # whether a backward pass has added a gradient since grad_version was read

    def holds(self, parameter: Tensor, state: tuple[Any, ...]) -> bool:
        same = self.state == state and self.storage.cdata == parameter.untyped_storage()._cdata
        return same and self.still_accumulates(parameter.grad)

    def still_accumulates(self, grad: Tensor | None) -> bool:
        """Whether the gradient has changed only by accumulation.

        Code that removes or overwrites the gradient may have updated the weight with it, as may code that got a
        gradient from ``torch.autograd.grad``.
        """
        if grad is None:
            return self.grad is None and not self.gradient_given
        expected = 0.0
        if self.grad is None:  # the first gradient since the weight was quantized
            self.grad = StorageWeakRef(grad.untyped_storage())
        elif self.grad.cdata == grad.untyped_storage()._cdata:
            expected = self.grad_version + self.gradient_given
        else:
            return False
        self.grad_version, self.gradient_given = _version(grad), False
        return self.grad_version == expected

    def is_given(self, grad: Tensor | None) -> bool:
        """Record that a backward pass is about to add to the gradient; return whether the entry is still valid."""
        if grad is not None:
            seen = self.grad is not None and self.grad_version == _version(grad)
            if not seen and not self.still_accumulates(grad):
                return False
        self.gradient_given = True
        return True


def _version(grad: Tensor) -> float:
    """Return a gradient's version counter; NaN, which equals nothing, for a gradient made in inference mode."""
    try:
        return grad._version
    except RuntimeError:
        return math.nan


def _state(parameter: Tensor, weight: Tensor, quantizer: Quantizer) -> tuple[Any, ...]:
    stream = torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else None
    counts = parameter._version, _optimizer_steps, _collectives(parameter.device)
    return *counts, parameter.data_ptr(), parameter.dtype, weight.dtype, quantizer, stream


def _collectives(device: torch.device) -> object:
    """Return a value that changes whenever a collective may have run on the device and written a weight."""
    if not _DISTRIBUTED:
        return None
    world: Any = dist.distributed_c10d._world
    if world.default_pg is None:
        return sys.excepthook  # every `init_process_group` sets a new hook, which remains after the groups
    try:
        return world.group_count, [  # group_count never decreases, so it also counts destroyed groups
            (ref(group), group._get_backend(device)._get_sequence_number_for_group())
            for group in world.pg_map
            if any(device.type == reached.type for reached in group._device_types)
        ]
    except RuntimeError:  # the backend does not count collectives
        return object()


def _checksum(parameter: Tensor) -> Tensor | None:
    """Return the sums of a weight's bits along rows and along columns; None without FUSEDMOE_DEBUG."""
    if not debugging():
        return None
    bits = parameter.detach().view(_BITS[parameter.element_size()])
    return torch.cat([bits.sum(axis, dtype=torch.int64).flatten() for axis in (-1, -2)])


_BITS = {2: torch.int16, 4: torch.int32}


def _cacheable(layer: Op, weight: Tensor) -> Tensor | None:
    """Return the parameter of a weight, which autocast may have cast; None if it must not be cached."""
    parameter = layer._parameters.get("weight")
    if parameter is None or type(weight) not in (Tensor, nn.Parameter) or parameter.is_inference():
        return None  # a parametrized weight (LoRA) is a new tensor in every call
    if not parameter.is_leaf:  # functional_call may pass a tensor that was computed for this call
        return None
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        layer._of_process.captured = True
    if layer._of_process.captured:
        return None
    if torch._C._are_functorch_transforms_active():
        return None
    if torch._C._len_torch_dispatch_stack():  # selective checkpointing needs the same operators in a recomputation
        return None
    return parameter


def find(layer: Op, weight: Tensor, quantizer: Quantizer, axes: Sequence[int], maker: str = "") -> _Entry | None:
    """Return the layer's entry if it is valid and has the forms for these axes.

    A rule, the ``maker``, gets its own forms only: another's may have strides that its kernels cannot read. Plain
    PyTorch, which is the empty name, reads the forms of all.
    """
    state = layer._of_process
    entry: _Entry | None = state.quantized_weight
    if entry is None:
        return None
    parameter = _cacheable(layer, weight)
    if layer._parameters.get("weight") is None or state.captured:
        state.quantized_weight = None
    if parameter is None or not entry.holds(parameter, _state(parameter, weight, quantizer)):
        return None
    if not all(axis in entry.forms for axis in axes) or maker not in ("", entry.maker):
        return None
    checksum = _checksum(parameter)
    if checksum is not None:
        if entry.checksum is None:  # cached before FUSEDMOE_DEBUG was set
            return None
        if not torch.equal(checksum, entry.checksum):
            place = f"{state.place}." if state.place else ""
            raise InputError(
                f"{place}{layer!r}: weight: changed since it was quantized, in a way that torch does not count "
                f"(through .data, a NumPy view, torch.distributed.recv): call fm.clear_weight_cache(model) after the "
                f"write, or write in place under torch.no_grad()"
            )
    return entry


def keep(
    layer: Op,
    weight: Tensor,
    quantizer: Quantizer,
    forms: dict[int, QuantizedTensor],
    counted: bool,
    maker: str = "",
) -> None:
    """Cache a weight's forms by axis, replacing the layer's entry."""
    parameter = _cacheable(layer, weight)
    if parameter is None:
        return
    _watch_optimizers()
    grad, version = None, 0.0
    if parameter.grad is not None:
        grad, version = StorageWeakRef(parameter.grad.untyped_storage()), _version(parameter.grad)
    storage = StorageWeakRef(parameter.untyped_storage())
    state, checksum = _state(parameter, weight, quantizer), _checksum(parameter)
    layer._of_process.quantized_weight = _Entry(storage, grad, version, state, forms, counted, checksum, maker)


def note_gradient(layer: Op) -> None:
    """Record that a backward pass is about to give a layer's weight a gradient."""
    entry: _Entry | None = layer._of_process.quantized_weight
    parameter = layer._parameters.get("weight")
    if entry is None or parameter is None or not parameter.requires_grad:
        return
    grad = parameter.grad
    if grad is None and getattr(layer, "accumulate_into_main_grad", False):
        return  # with main_grad, .grad is a placeholder
    if not entry.is_given(grad):
        layer._of_process.quantized_weight = None


def weight_cache_bytes(module: nn.Module) -> int:
    """Return the bytes of all cached quantized weights in a module and its submodules."""
    states = _states(MODULE("weight_cache_bytes: module", module))
    entries: list[_Entry] = [s.quantized_weight for s in states if s.quantized_weight is not None]
    return sum(form.nbytes for entry in entries for form in entry.forms.values())


def clear_weight_cache(module: nn.Module) -> None:
    """Clear the cached quantized weights of a module and its submodules; the next call quantizes them again.

    Needed only after a write that torch does not count: through ``.data`` (as in peft's ``merge_adapter()``), through a
    NumPy view, or by ``torch.distributed.recv``. ``docs/recipes.md`` lists all of them. With ``FUSEDMOE_DEBUG=1``, the
    next use of the weight raises an error if this call is missing.
    """
    for state in _states(MODULE("clear_weight_cache: module", module)):
        state.quantized_weight = None


def _states(module: nn.Module) -> list[ProcessState]:
    return [m._of_process for m in module.modules() if isinstance(m, HasProcessState)]
