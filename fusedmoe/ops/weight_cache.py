"""Weights are quantized once, and again when they have changed.

What is kept stands beside the layer, for one quantizer at a time. It is used as long as nothing says that the weight is
another:

- the parameter is in the same memory, with the same count of in-place changes (``load_state_dict``,
  ``torch.no_grad`` updates, fused and foreach optimizers);
- no ``torch.optim`` optimizer has stepped since, not even one that writes through ``.data``, which torch does not
  count;
- no gradient that it has got since is gone: ``.grad`` was not set to None, nor to another tensor, and nothing except
  the accumulation of gradients has changed it in place (its count of changes says so);
- nobody has set the parameter on the module, as FSDP2 does when it unshards and reshards: that also frees what is
  kept;
- no process group of ``torch.distributed`` has run a collective since on the weight's device, and none was made or
  destroyed: a collective may write to the weight, and torch does not count that;
- the CUDA stream is the same one.

Nothing is read or kept while a CUDA graph is captured: a graph quantizes in every replay. Nor is it ever after, for a
layer that was captured: a replay may change its weight, and says so to nobody.

Any other write that torch does not count goes unnoticed; ``docs/recipes.md`` lists them. `clear_weight_cache` must be
called after it. With ``FUSEDMOE_DEBUG=1`` each use compares a checksum of the weight, and raises an error if it
differs.
"""

from __future__ import annotations

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

if TYPE_CHECKING:
    from fusedmoe.formats import QuantizedTensor, Quantizer
    from fusedmoe.ops.op import Op

_NAME = "_quantized_weight"  # on the layer; dropped with every parameter that is set, see `Op.__setattr__`
_PLACE = "_place"  # on the layer: its label in a Sequential, with the name of that in a model where it is known
_CAPTURED = "_captured"  # on the layer: whether a CUDA graph has its weight

_DISTRIBUTED = dist.is_available()
_optimizer_steps = 0
_hook: Any = None


def _count_step(*_: object) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


def _watch_optimizers() -> None:
    global _hook
    if _hook is None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        _hook = register_optimizer_step_post_hook(_count_step)


@dataclass
class _Entry:
    # of the parameter and of its gradient: as long as it is held, no other storage has its address (a weak reference to
    # the tensor itself would keep torch from swapping it)
    storage: StorageWeakRef
    grad: StorageWeakRef | None
    grad_version: float  # the gradient's count of in-place changes
    state: tuple[Any, ...]
    forms: dict[int, QuantizedTensor]
    counted: bool  # whether delayed scaling has added the weight as a step
    checksum: Tensor | None  # of the parameter, with FUSEDMOE_DEBUG
    gradient_given: bool = False  # by a backward pass since the gradient was looked at

    def holds(self, parameter: Tensor, state: tuple[Any, ...]) -> bool:
        same = self.state == state and self.storage.cdata == parameter.untyped_storage()._cdata
        return same and self.still_accumulates(parameter.grad)

    def still_accumulates(self, grad: Tensor | None) -> bool:
        """Whether backward passes have only added to the gradient since: whoever takes it away or overwrites it has
        perhaps changed the weight by it, and so has whoever got one from ``torch.autograd.grad``.
        """
        if grad is None:
            return self.grad is None and not self.gradient_given
        expected = 0.0
        if self.grad is None:  # the first since the weight was quantized: nothing was added to it yet
            self.grad = StorageWeakRef(grad.untyped_storage())
        elif self.grad.cdata == grad.untyped_storage()._cdata:
            expected = self.grad_version + self.gradient_given
        else:
            return False
        self.grad_version, self.gradient_given = _version(grad), False
        return self.grad_version == expected

    def is_given(self, grad: Tensor | None) -> bool:
        """Note that a backward pass is about to add to the gradient; whether it was only added to until now."""
        if grad is not None:
            seen = self.grad is not None and self.grad_version == _version(grad)
            if not seen and not self.still_accumulates(grad):
                return False
        self.gradient_given = True
        return True


def _version(grad: Tensor) -> float:
    """Return a gradient's count of in-place changes; of one that was made in inference mode, what equals nothing."""
    try:
        return grad._version
    except RuntimeError:
        return math.nan


def _state(parameter: Tensor, weight: Tensor, quantizer: Quantizer) -> tuple[Any, ...]:
    stream = torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else None
    counts = parameter._version, _optimizer_steps, _collectives(parameter.device)
    return *counts, parameter.data_ptr(), parameter.dtype, weight.dtype, quantizer, stream


def _collectives(device: torch.device) -> object:
    """Return what differs from before if a collective has run on such a device since: it may have written a weight."""
    if not _DISTRIBUTED:
        return None
    world: Any = dist.distributed_c10d._world
    if world.default_pg is None:
        return sys.excepthook  # of every `init_process_group` a new one, which stays when the groups are destroyed
    try:
        return world.group_count, [  # which grows when a group is made, also one that is gone by now
            (ref(group), group._get_backend(device)._get_sequence_number_for_group())
            for group in world.pg_map
            if any(device.type == reached.type for reached in group._device_types)
        ]
    except RuntimeError:  # of a backend that does not count: there may have been one
        return object()


def _checksum(parameter: Tensor) -> Tensor | None:
    """Return the sums of a weight's bits along rows and along columns, with FUSEDMOE_DEBUG: any write changes some."""
    if not debugging():
        return None
    bits = parameter.detach().view(_BITS[parameter.element_size()])
    return torch.cat([bits.sum(axis, dtype=torch.int64).flatten() for axis in (-1, -2)])


_BITS = {2: torch.int16, 4: torch.int32}


def _cacheable(layer: Op, weight: Tensor) -> Tensor | None:
    """Return the parameter that a weight is, or was cast from by autocast; None where nothing may be kept."""
    parameter = layer._parameters.get("weight")
    if parameter is None or type(weight) not in (Tensor, nn.Parameter) or parameter.is_inference():
        return None  # parametrized (LoRA): another tensor every time
    if not parameter.is_leaf:  # computed for this very call, as those of functional_call may be
        return None
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        layer.__dict__[_CAPTURED] = True
    if _CAPTURED in layer.__dict__:
        return None
    if torch._C._are_functorch_transforms_active():
        return None
    if torch._C._len_torch_dispatch_stack():  # selective checkpointing counts on meeting the same operators again
        return None
    return parameter


def find(layer: Op, weight: Tensor, quantizer: Quantizer, axes: Sequence[int]) -> _Entry | None:
    """Return what is kept, where it still holds and has these forms."""
    entry: _Entry | None = layer.__dict__.get(_NAME)
    if entry is None:
        return None
    parameter = _cacheable(layer, weight)
    if layer._parameters.get("weight") is None or _CAPTURED in layer.__dict__:  # parametrized or captured since
        del layer.__dict__[_NAME]
    if parameter is None or not entry.holds(parameter, _state(parameter, weight, quantizer)):
        return None
    if not all(axis in entry.forms for axis in axes):
        return None
    checksum = _checksum(parameter)
    if checksum is not None:
        if entry.checksum is None:  # kept before FUSEDMOE_DEBUG was set
            return None
        if not torch.equal(checksum, entry.checksum):
            called = f"{layer.__dict__[_PLACE]}." if _PLACE in layer.__dict__ else ""
            raise InputError(
                f"{called}{layer!r}: weight: changed since it was quantized, in a way that torch does not count "
                f"(through .data, a NumPy view, torch.distributed.recv): call fm.clear_weight_cache(model) after such "
                f"a write, or write in place under torch.no_grad()"
            )
    return entry


def keep(layer: Op, weight: Tensor, quantizer: Quantizer, forms: dict[int, QuantizedTensor], counted: bool) -> None:
    """Keep a weight's forms, by axis, in the place of what was kept."""
    parameter = _cacheable(layer, weight)
    if parameter is None:
        return
    _watch_optimizers()
    grad, version = None, 0.0
    if parameter.grad is not None:
        grad, version = StorageWeakRef(parameter.grad.untyped_storage()), _version(parameter.grad)
    storage = StorageWeakRef(parameter.untyped_storage())
    state, checksum = _state(parameter, weight, quantizer), _checksum(parameter)
    layer.__dict__[_NAME] = _Entry(storage, grad, version, state, forms, counted, checksum)


def note_gradient(layer: Op) -> None:
    """Note that a backward pass through a layer is about to give its weight a gradient."""
    entry: _Entry | None = layer.__dict__.get(_NAME)
    parameter = layer._parameters.get("weight")
    if entry is None or parameter is None or not parameter.requires_grad:
        return
    grad = parameter.grad
    if grad is None and getattr(layer, "accumulate_into_main_grad", False):
        return  # with main_grad, .grad comes and goes and means nothing
    if not entry.is_given(grad):
        layer.__dict__.pop(_NAME, None)


def weight_cache_bytes(module: nn.Module) -> int:
    """Return the bytes that quantized weights take beside the parameters of a module and all within it."""
    MODULE("weight_cache_bytes: module", module)
    entries = [m.__dict__[_NAME] for m in module.modules() if _NAME in m.__dict__]
    return sum(form.nbytes for entry in entries for form in entry.forms.values())


def clear_weight_cache(module: nn.Module) -> None:
    """Forget the quantized weights of a module and all within it: the next call quantizes them again.

    Needed only after weights were changed in a way that torch does not count: through ``.data`` (as ``merge_adapter()``
    of peft does), through a NumPy view, or by ``torch.distributed.recv``. ``docs/recipes.md`` lists them all. With
    ``FUSEDMOE_DEBUG=1`` a missing call is an error.
    """
    for m in MODULE("clear_weight_cache: module", module).modules():
        m.__dict__.pop(_NAME, None)
