"""Dense MLPs of transformers: `patch_dense` runs ``down(act(gate(x)) * up(x))`` with the kernels.

The kernels read the weights of gate and up as one, ``[gate; up]``, while transformers has two parameters. `patch_dense`
therefore gives the two one memory, which needs no further copy. If they are apart in memory later, such as after
``model.to`` or under FSDP, each call copies them.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from fusedmoe.base.checks import MODULE
from fusedmoe.base.errors import InputError
from fusedmoe.base.log import say_once
from fusedmoe.fusion.report.data import Explanation
from fusedmoe.integrations.transformers.gates import RowLayout, functions_of, recognise
from fusedmoe.layers.explain_model import register_explainer
from fusedmoe.layers.sequential import Sequential
from fusedmoe.ops import Linear
from fusedmoe.ops.op import constant_in_graphs, made_untraced

logger = logging.getLogger(__name__)

_OPS = "_fusedmoe_mlp"  # in the module's __dict__, not a submodule, so that the state_dict does not include it
_LAYERS = "gate_proj", "up_proj", "down_proj"
_ROWS = RowLayout(gated=True, interleaved=False, intermediate=8)  # that `recognise` calls the gate with


class _Mlp(NamedTuple):
    """The ops of an MLP, and the properties of the module that they depend on."""

    chain: Sequential
    shapes: tuple[object, ...]
    biased: tuple[bool, bool]
    functions: tuple[object, ...]


def patch_dense(model: nn.Module) -> int:
    """Run the dense MLPs of a model with the kernels; return their number. `unpatch_dense` restores the model.

    A dense MLP has ``gate_proj``, ``up_proj`` and ``down_proj``, each an ``nn.Linear``, and ``act_fn``. It computes
    ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``, as `LlamaMLP` and the shared experts of most families do. A module
    of these parts with another function, or with an activation that is not recognised, stays as it is, and a WARNING
    names its class. Parameters, their names and the ``state_dict`` do not change.

    The weights of ``gate_proj`` and ``up_proj`` move into one memory, where the kernels read both at once. Call this
    function when the model is on its device, in its dtype. Where the two weights are apart in a call, they are copied
    first: under `torch.compile`, under FSDP, and after ``model.to`` or a deep copy. Repeated calls only move weights
    together again.

    A module runs as before, without kernels and recipes, while one of its three layers is no plain ``nn.Linear``, such
    as with LoRA or quantized, or has hooks (such as accelerate's) or DTensors, or another shape. A WARNING names the
    reason.

    Raises `InputError`: the model has no such MLP, or other code has replaced a ``forward``.
    """
    candidates = [(n, m) for n, m in MODULE("patch_dense: model", model).named_modules() if _has_the_layers(m)]
    if not candidates:
        expected = f"a model with MLPs of {', '.join(_LAYERS)} (nn.Linear) and act_fn"
        raise InputError(f"patch_dense: expected {expected}, got {type(model).__name__}")
    for name, module in candidates:
        replaced = vars(module).get("forward")
        if replaced is not None and not _is_patched(module):
            raise InputError(f"patch_dense: the forward of {name!r} was already replaced, by {replaced!r}")
    return sum(_patch(module) for _, module in candidates)


def unpatch_dense(model: nn.Module) -> int:
    """Undo `patch_dense`; return the number of MLPs. Weights that share a memory continue to."""
    patched = [module for module in MODULE("unpatch_dense: model", model).modules() if _is_patched(module)]
    for module in patched:
        del module.forward, module.__dict__[_OPS]
    return len(patched)


def _patch(module: Any) -> bool:
    activation = recognise(module, _gate_of, _ROWS)
    if activation is None:
        message = "%s: it is no MLP whose function can be fused, so patch_dense leaves it as it is"
        say_once(logger, logging.WARNING, message, type(module).__name__)
        return False
    gate, up, down = _layers_of(module)
    biased = gate.bias is not None, down.bias is not None
    (intermediate, hidden), features = gate.weight.shape, down.weight.shape[0]
    ops = OrderedDict(
        gate_up=made_untraced(Linear, hidden, 2 * intermediate, bias=biased[0], device="meta"),
        activation=activation,
        down=made_untraced(Linear, intermediate, features, bias=biased[1], device="meta"),
    )
    chain = Sequential(ops).without_parameters()
    module.__dict__[_OPS] = _Mlp(chain, _shapes_of(module), biased, functions_of(module))
    for name in ("weight", "bias"):
        _move_together(getattr(gate, name), getattr(up, name))
    for layer in (gate, up):  # the hook stays after `unpatch_dense`, as the shared memory does
        if _save_apart not in layer._state_dict_hooks.values():
            layer.register_state_dict_post_hook(_save_apart)
    # a partial, since copies and pickles of it refer to the copied module
    module.forward = functools.partial(_forward, module)
    return True


def _gate_of(module: nn.Module, rows: Tensor) -> Tensor:
    """Compute the function between the layers: the forward of the class, with layers that return halves of rows."""
    layers = SimpleNamespace(
        gate_proj=lambda x: x.chunk(2, dim=-1)[0],
        up_proj=lambda x: x.chunk(2, dim=-1)[1],
        down_proj=lambda h: h,
        act_fn=module.act_fn,
    )
    result: Tensor = type(module).forward(layers, rows)
    return result


def _forward(self: nn.Module, x: Tensor) -> Tensor:
    mlp: _Mlp = self.__dict__[_OPS]
    if reason := _why_not(self, mlp):
        _say(f"{type(self).__name__}: {reason}")
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    return mlp.chain.forward_with(_parameters_of(self), x)


def _parameters_of(module: nn.Module) -> dict[str, Tensor | None]:
    gate, up, down = _layers_of(module)
    return {
        "gate_up.weight": _together(gate.weight, up.weight),
        "gate_up.bias": None if gate.bias is None else _together(gate.bias, up.bias),
        "down.weight": down.weight,
        "down.bias": down.bias,
    }


@register_explainer
def _explained(module: nn.Module, tokens: int) -> Explanation | None:
    if not _is_patched(module):
        return None
    mlp: _Mlp = module.__dict__[_OPS]
    if reason := _why_not(module, mlp):
        raise InputError(f"{type(module).__name__}: {reason}, {_AS_BEFORE}")
    parameters = _parameters_of(module)
    weight = parameters["down.weight"]
    assert weight is not None
    kind = weight.device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else weight.dtype
    width = parameters["gate_up.weight"].shape[1]  # type: ignore[union-attr]
    x = torch.zeros(tokens, width, dtype=dtype, device=weight.device, requires_grad=torch.is_grad_enabled())
    return mlp.chain.explain_with(parameters, x)


# ---- which modules ------------------------------------------------------------------------------------------------


def _layers_of(module: Any) -> tuple[Any, Any, Any]:
    return module.gate_proj, module.up_proj, module.down_proj


def _has_the_layers(module: nn.Module) -> bool:
    """Whether a module has the three layers, plain and of sizes that fit, and ``act_fn``."""
    if not hasattr(module, "act_fn") or not all(type(getattr(module, name, None)) is nn.Linear for name in _LAYERS):
        return False
    gate, up, down = _layers_of(module)
    biased = gate.bias is not None
    # not `out_features`, which a user who prunes the weights may leave as it was
    fits = gate.weight.shape == up.weight.shape and down.weight.shape[1] == gate.weight.shape[0]
    return fits and biased is (up.bias is not None)


def _is_patched(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, functools.partial) and forward.func is _forward


_AS_BEFORE = "so it runs as before patch_dense, without kernels and recipes"


def _why_not(module: nn.Module, mlp: _Mlp) -> str:
    """Return why the ops no longer compute what the module's class computes; "" if they do."""
    gate, up, down = _layers_of(module)
    if not (_is_plain(gate) and _is_plain(up) and _is_plain(down)):
        return next(f"{name} {_kind_of(getattr(module, name))}" for name in _LAYERS if _kind_of(getattr(module, name)))
    if ((gate.bias is not None), (down.bias is not None)) != mlp.biased or (up.bias is not None) is not mlp.biased[0]:
        return "a bias was added or removed since; call patch_dense again"
    if _shapes_of(module) != mlp.shapes:
        return "its weights have other shapes than before; call patch_dense again"
    # a graph has guards on the module; it is traced again after `torch.compiler.reset`
    if torch.compiler.is_compiling() or functions_of(module) == mlp.functions:
        return ""
    return "its act_fn or its forward has changed since; call patch_dense again"


def _shapes_of(module: nn.Module) -> tuple[object, ...]:
    gate, up, down = _layers_of(module)
    return gate.weight.shape, up.weight.shape, down.weight.shape


def _is_plain(layer: Any) -> bool:
    return type(layer) is nn.Linear and not _has_hooks(layer) and _is_plain_tensor(layer.weight)


def _has_hooks(layer: Any) -> bool:
    """Whether a call of a layer does more than its class's ``forward``; accelerate replaces the ``forward``."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return bool(hooks) or "forward" in layer.__dict__


def _kind_of(layer: Any) -> str:
    """Return how a layer differs from a plain ``nn.Linear``; "" if it does not."""
    if type(layer) is not nn.Linear:
        return f"is a {type(layer).__name__}, not an nn.Linear"
    if _has_hooks(layer):
        return "has hooks or a forward of its own (accelerate's hooks are such)"
    return "" if _is_plain_tensor(layer.weight) else f"has a weight of {type(layer.weight).__name__}"


@constant_in_graphs
def _say(reason: str) -> None:
    """Say once why an MLP runs as before. While a graph is traced, this runs too."""
    say_once(logger, logging.WARNING, "%s, %s", reason, _AS_BEFORE)


def _is_plain_tensor(t: object) -> bool:
    return type(t) is nn.Parameter or type(t) is Tensor


# ---- two tensors as one -------------------------------------------------------------------------------------------


def _together(first: Tensor, second: Tensor) -> Tensor:
    """Return the rows of both tensors: a view if they follow each other in memory, otherwise a copy."""
    # a graph of torch.compile has no addresses
    if torch.compiler.is_compiling() or not _follow_each_other(first, second):
        return torch.cat([first, second])
    return _View.apply(first, second)  # type: ignore[no-untyped-call, no-any-return]


class _View(torch.autograd.Function):
    """The rows of two tensors that follow each other in memory."""

    @staticmethod
    def forward(first: Tensor, second: Tensor) -> Tensor:
        shape = (len(first) + len(second), *first.shape[1:])
        return first.detach().as_strided(shape, first.stride())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.rows = len(inputs[0])
        # the view has the version of the first tensor, so that autograd notices in-place changes of that one only
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        _ = ctx.saved_tensors  # raises if it was changed after the forward pass
        return grad[: ctx.rows], grad[ctx.rows :]


def _follow_each_other(first: Tensor, second: Tensor) -> bool:
    return (
        _memory(first) == _memory(second)
        and second.storage_offset() == first.storage_offset() + first.numel()
        and first.dtype is second.dtype
        and first.is_contiguous()
        and second.is_contiguous()
    )


def _memory(t: Tensor) -> int:
    """Return an id of a tensor's storage, also if it has no address (a fake tensor)."""
    return int(t.untyped_storage()._cdata)


@torch.no_grad()
def _move_together(first: nn.Parameter | None, second: nn.Parameter | None) -> None:
    """Move two parameters into one memory, unless one is on the meta device or in memory that other tensors may use."""
    if first is None or second is None or not (_owns_memory(first) and _owns_memory(second)):
        return
    if (first.dtype, first.device) == (second.dtype, second.device):
        with torch.inference_mode(first.is_inference()):  # as `first`, also in a caller's inference mode
            both = torch.cat([first.data, second.data])
        first.data, second.data = both[: len(first)], both[len(first) :]


def _save_apart(layer: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object) -> None:
    """Give a state_dict the weights of a layer in storages of their own, at the same addresses.

    accelerate saves only one of the tensors that share a storage, and safetensors refuses a part of a storage.
    """
    for name in ("weight", "bias"):
        t = state_dict.get(prefix + name)
        if type(t) is not Tensor or t.is_meta or t.untyped_storage().nbytes() != 2 * t.numel() * t.element_size():
            continue
        apart = from_dlpack(t) if t.device.type in ("cpu", "cuda") else t.clone()
        state_dict[prefix + name] = apart


def _owns_memory(t: Tensor) -> bool:
    if not _is_plain_tensor(t) or t.is_meta or not t.is_contiguous():
        return False
    if t.device.type == "cpu" and t.is_shared():  # with other processes
        return False
    return t.untyped_storage().nbytes() == t.numel() * t.element_size()
