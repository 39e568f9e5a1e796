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

A weight that the caller passes in each call, as integrations pass the parameters of a framework's module, is cached
under the same conditions if it is an ``nn.Parameter``, or a view of all of one, such as ``parameter.mT``. Any other
tensor was computed for the call. Two more conditions apply:

- No module of the process is under FSDP2. It unshards a parameter for each call in the same tensor and the same memory.
  Torch does not count this write, nor is it a collective in a group of one process.
- The codes are likely to be used: a later call has found the weight unchanged since the quantization before. No call
  does if weights are gathered for each call, as by DeepSpeed's ZeRO-3, or if each call is a step. The codes would only
  take memory.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from fusedmoe.base.checks import MODULE
from fusedmoe.base.environment import debugging
from fusedmoe.base.errors import InputError
from fusedmoe.base.lasting import current_stream
from fusedmoe.base.process_state import HasProcessState, ProcessState
from fusedmoe.expert_parallel.engine import collectives
from fusedmoe.numerics.formats import QuantizedTensor, Quantizer
from fusedmoe.numerics.formats.packed import Packed, PackedTensor
from fusedmoe.ops.op import Op

_DISTRIBUTED = dist.is_available()
_optimizer_steps = 0

# the weights that the current call passes, before autocast, by layer
_passed: ContextVar[Mapping[Op, Tensor]] = ContextVar("fusedmoe.weight_cache.passed", default=MappingProxyType({}))


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
    collectives: object  # see `_collectives`
    strides: list[int] | None  # of the weight, see `_strides`; None if autograd never compares them
    forms: dict[int | Packed, QuantizedTensor | PackedTensor]  # by axis; empty if they were not worth their memory
    counted: bool  # whether delayed scaling has counted the weight as a step
    checksum: Tensor | None  # of the parameter, with FUSEDMOE_DEBUG
    maker: str  # the rule that made the forms; empty for plain PyTorch
    gradient_given: bool = False  # whether a backward pass has added a gradient since grad_version was read
    first_version: float = 0.0  # version counter of a first gradient
    used: bool = False  # whether a later call has found the weight unchanged

    def holds(self, parameter: Tensor, state: tuple[Any, ...]) -> bool:
        # in training, the state differs in most calls: the process groups, which take the host longest, come last
        same = self.state == state and self.storage.cdata == parameter.untyped_storage()._cdata
        same = same and self.still_accumulates(parameter.grad)
        return same and self.collectives == _collectives(parameter.device)

    def still_accumulates(self, grad: Tensor | None) -> bool:
        """Whether the gradient has changed only by accumulation.

        Code that removes or overwrites the gradient may have updated the weight with it, as may code that got a
        gradient from ``torch.autograd.grad``.
        """
        if grad is None:
            return self.grad is None and not self.gradient_given
        expected = self.first_version
        if self.grad is None:  # the first gradient since the weight was quantized
            self.grad = StorageWeakRef(grad.untyped_storage())
        elif self.grad.cdata == grad.untyped_storage()._cdata:
            expected = self.grad_version + self.gradient_given
        else:
            return False
        self.grad_version, self.gradient_given = _version(grad), False
        return self.grad_version == expected

    def is_given(self, grad: Tensor | None, copied: bool) -> bool:
        """Record that a backward pass is about to add to the gradient; return whether the entry is still valid.

        ``copied``: autograd copies a first gradient in place into a new tensor, since its strides are not those of the
        weight.
        """
        if grad is not None:
            seen = self.grad is not None and self.grad_version == _version(grad)
            if not seen and not self.still_accumulates(grad):
                return False
        else:
            self.first_version = float(copied)
        self.gradient_given = True
        return True


def _version(grad: Tensor) -> float:
    """Return a gradient's version counter; NaN, which equals nothing, for a gradient made in inference mode."""
    try:
        return grad._version
    except RuntimeError:
        return math.nan


def _state(source: Tensor, weight: Tensor, quantizer: Quantizer) -> tuple[Any, ...]:
    stream = current_stream(weight.device) if weight.is_cuda else None
    layout = source.data_ptr(), source.dtype, source.shape, source.stride()
    # a new parameter over the same memory counts its versions from zero
    return _parameter(source)._cdata, source._version, _optimizer_steps, *layout, weight.dtype, quantizer, stream


def _strides(t: Tensor) -> list[int]:
    """Return the strides of the axes that autograd compares between a weight and its gradient."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size != 1]


def _is_dense(t: Tensor) -> bool:
    """Whether the elements fill their memory without gaps and without overlaps."""
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _collectives(device: torch.device) -> object:
    """Return a value that changes whenever a collective may have run on the device and written a weight."""
    if not _DISTRIBUTED:
        return None
    world: Any = dist.distributed_c10d._world
    if world.default_pg is None:
        return sys.excepthook  # every `init_process_group` sets a new hook, which remains after the groups
    groups = [g for g in world.pg_map if any(device.type == reached.type for reached in g._device_types)]
    counted = [(ref(group), collectives(group, device)) for group in groups]
    if any(count is None for _, count in counted):
        return object()
    return world.group_count, counted  # group_count never decreases, so it also counts destroyed groups


def _checksum(source: Tensor) -> Tensor | None:
    """Return the sums of a weight's bits along rows and along columns; None without FUSEDMOE_DEBUG."""
    if not debugging():
        return None
    bits = source.detach().view(_BITS[source.element_size()])
    return torch.cat([bits.sum(axis, dtype=torch.int64).flatten() for axis in (-1, -2)])


_BITS = {2: torch.int16, 4: torch.int32}


# ---- weights that a call passes --------------------------------------------------------------------------------------


def passed_weights(layers: Sequence[tuple[Op, int]], arguments: Sequence[Tensor | None]) -> dict[Op, Tensor]:
    """Return the weights among a call's arguments that their layers do not own, by layer. A layer that the chain has
    twice, with different weights, has none.

    ``layers`` has each layer, and the position of its weight. The arguments are those before autocast.
    """
    found: dict[Op, Tensor | None] = {}
    for layer, i in layers:
        weight = arguments[i]
        if layer._parameters.get("weight") is None:
            found[layer] = weight if found.get(layer, weight) is weight else None
    return {layer: t for layer, t in found.items() if t is not None}


@contextmanager
def passing(weights: Mapping[Op, Tensor]) -> Iterator[None]:
    """Cache these weights, by layer, in the call inside the block, if they are parameters or views of parameters."""
    token = _passed.set(weights)
    try:
        yield
    finally:
        _passed.reset(token)


def trained_of_call() -> dict[Op, Tensor]:
    """Return the parameters of the weights that the current call passes and that require a gradient, by layer."""
    passed = _passed.get().items()
    return {layer: _parameter(t) for layer, t in passed if t.requires_grad and _is_whole_parameter(t)}


def _parameter(source: Tensor) -> Tensor:
    """Return the tensor whose memory and gradient are watched: of a view its base."""
    return source if source._base is None else source._base


def _is_whole_parameter(source: Tensor) -> bool:
    parameter = _parameter(source)
    return type(parameter) is nn.Parameter and parameter.numel() == source.numel()


def _uses_fsdp2() -> bool:
    """Whether a module of this process is under FSDP2."""
    return bool(getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", ()))


# ---- the entries -----------------------------------------------------------------------------------------------------


def _source(layer: Op, weight: Tensor) -> Tensor | None:
    """Return the tensor that a weight is, or that autocast has cast to it; None if the weight must not be cached."""
    source: Tensor | None = layer._parameters.get("weight")
    if source is not None:
        if not source.is_leaf:  # functional_call may pass a tensor that was computed for this call
            return None
    else:
        source = _passed.get().get(layer)
        if source is None or not _is_whole_parameter(source) or _uses_fsdp2():
            return None  # a computed or parametrized weight (LoRA) is a new tensor in every call
    if type(weight) not in (Tensor, nn.Parameter) or source.is_inference():
        return None
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        layer._of_process.captured = True
    if layer._of_process.captured:
        return None
    if torch._C._are_functorch_transforms_active():
        return None
    if torch._C._len_torch_dispatch_stack():  # selective checkpointing needs the same operators in a recomputation
        return None
    return source


def find(
    layer: Op, weight: Tensor, quantizer: Quantizer, axes: Sequence[int | Packed], maker: str = ""
) -> _Entry | None:
    """Return the layer's entry if it is valid and has the forms for these axes.

    A rule, the ``maker``, gets its own forms only: another's may have strides that its kernels cannot read. Plain
    PyTorch, which is the empty name, reads the forms of all.
    """
    state = layer._of_process
    entry: _Entry | None = state.quantized_weight
    if entry is None:
        return None
    source = _source(layer, weight)
    if state.captured or (source is None and layer._parameters.get("weight") is None):
        state.quantized_weight = None
    if source is None or not entry.holds(_parameter(source), _state(source, weight, quantizer)):
        return None
    entry.used = True
    if not all(axis in entry.forms for axis in axes) or maker not in ("", entry.maker):
        return None
    checksum = _checksum(source)
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
    forms: dict[int | Packed, QuantizedTensor | PackedTensor],
    counted: bool,
    maker: str = "",
) -> None:
    """Cache a weight's forms by axis, replacing the layer's entry."""
    source = _source(layer, weight)
    if source is None:
        return
    _watch_optimizers()
    parameter, grad, version = _parameter(source), None, 0.0
    if parameter.grad is not None:
        grad, version = StorageWeakRef(parameter.grad.untyped_storage()), _version(parameter.grad)
    storage = StorageWeakRef(parameter.untyped_storage())
    state, checksum = _state(source, weight, quantizer), _checksum(source)
    forms = forms if _is_worthwhile(layer) else {}
    strides = _strides(source) if _is_dense(source) else None
    groups = _collectives(parameter.device)
    entry = _Entry(storage, grad, version, state, groups, strides, forms, counted, checksum, maker)
    layer._of_process.quantized_weight = entry


def _is_worthwhile(layer: Op) -> bool:
    """Whether a later call is likely to use a weight's forms."""
    if layer._parameters.get("weight") is not None:
        return True
    before: _Entry | None = layer._of_process.quantized_weight
    return not (_DISTRIBUTED and dist.is_initialized()) if before is None else before.used


def note_gradient(layer: Op, gradient: Tensor | None, passed: Tensor | None) -> None:
    """Record that a backward pass is about to give a layer's weight this gradient.

    ``passed`` is the parameter of a weight that the call passed; None if its gradient is not required.
    """
    entry: _Entry | None = layer._of_process.quantized_weight
    parameter: Tensor | None = layer._parameters.get("weight")
    if parameter is None:
        parameter = passed
    if entry is None or parameter is None or not parameter.requires_grad:
        return
    if entry.storage.cdata != parameter.untyped_storage()._cdata:
        return  # the weight of another model, which shares the layer
    grad = parameter.grad
    if grad is None and getattr(layer, "accumulate_into_main_grad", False):
        return  # with main_grad, .grad is a placeholder
    copied = gradient is not None and entry.strides is not None and _strides(gradient) != entry.strides
    if not entry.is_given(grad, copied):
        layer._of_process.quantized_weight = None


def weight_cache_bytes(module: nn.Module) -> int:
    """Return the bytes of all cached quantized weights in a module and its submodules.

    The ops that `fusedmoe.integrations` attaches to modules of other frameworks count too.
    """
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
    """Return the states of a module's ops, and of the ops that an integration keeps in the ``__dict__`` of a module."""
    found: dict[int, ProcessState] = {}  # by id: an op may be in several chains
    for m in module.modules():
        values = [v for value in vars(m).values() for v in (value if isinstance(value, tuple) else (value,))]
        chains = [v for v in values if isinstance(v, HasProcessState) and isinstance(v, nn.Module)]
        for op in (m, *(op for chain in chains for op in chain.modules())):
            if isinstance(op, HasProcessState):
                found[id(op._of_process)] = op._of_process
    return list(found.values())
