"""The ops for an experts module of transformers; see `fusedmoe.integrations.transformers`."""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusedmoe.base.errors import InputError
from fusedmoe.base.log import say_once
from fusedmoe.expert_parallel import ExpertParallel
from fusedmoe.integrations.transformers.gates import GATE, SETTINGS, RowLayout, functions_of, recognise, settings_of
from fusedmoe.layers.sequential import Sequential
from fusedmoe.numerics.formats import fp8_block
from fusedmoe.ops import Combine, Dispatch, GroupedLinear, Op, Scale
from fusedmoe.ops.op import constant_in_graphs, made_untraced

logger = logging.getLogger(__name__)

# in the module's __dict__, not submodules, so that the state_dict does not include them
OPS = "_fusedmoe_experts"
ROUTER = "_fusedmoe_router"  # of a router that `patch_routers` has patched, and of its experts
RANKS = "_fusedmoe_ranks"  # the `ExpertParallel` of experts that exchange their tokens themselves
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # of weights that are not quantized
_LAYOUT_SETTINGS = (
    "num_experts", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated",
    "activation_scheme", "block_size",
)  # fmt: skip
TOP_K = "num_experts_per_tok", "top_k_experts", "moe_topk"  # names of K in configurations


class Layout(NamedTuple):
    """The layout of a module's parameters, and its operations other than the two products and the activation."""

    gated: bool
    interleaved: bool  # gate and up alternate
    transposed: bool  # weights are (E, in, out)
    biased: bool
    normed: bool  # a norm follows the second product
    scales_input: bool  # the routing weight multiplies the input of an expert, not its output
    fp8: bool = False  # the weights are in FP8, and are multiplied as they are stored


class Experts(NamedTuple):
    """The ops of an experts module, and the properties of the module that they depend on."""

    chain: Sequential
    layout: Layout
    names: tuple[str, ...]  # of the attributes in `settings`
    settings: tuple[object, ...]
    functions: tuple[object, ...]
    shapes: tuple[object, ...]  # of the weights
    weight_type: type
    weight_dtype: torch.dtype
    stock: Callable[..., Tensor] | None = None  # transformers' forward, for quantized weights without a product here
    routed: Sequential | None = None  # the ops of `chain` after those of a patched router

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the module makes new ops


# ---- the ops of a module, made again after a change ---------------------------------------------------------------


def experts_of(module: nn.Module) -> Experts:
    """Return a module's ops, which are made again only if the module has changed."""
    if torch.compiler.is_compiling():
        # runs while the graph is traced; the comparison below becomes guards on the settings
        _let_prepare(type(module))
        module._fusedmoe_prepare()  # type: ignore[operator]
        experts: Experts = getattr(module, OPS)  # not from `__dict__`, which Dynamo may have read before
        if settings_of(module, experts.names) == experts.settings:
            return experts
    found: Experts | None = module.__dict__.get(OPS)
    if found is None or not _is_current(module, found):
        _fusedmoe_prepare(module)
        found = module.__dict__[OPS]
    return found


def _is_current(module: nn.Module, experts: Experts) -> bool:
    weight = module._parameters.get("down_proj")
    if type(weight) is not experts.weight_type or (weight is not None and weight.dtype is not experts.weight_dtype):
        layout = layout_of(module)
        if layout.fp8 is not experts.layout.fp8 or _runs_as_stock(module, layout) is not (experts.stock is not None):
            return False
    # FSDP1 may keep a weight outside of the parameters in some calls
    shapes = zip(_shapes_of(module, experts.layout), experts.shapes, strict=True)
    if any(now is not None and before is not None and now != before for now, before in shapes):
        return False
    return settings_of(module, experts.names) == experts.settings and functions_of(module) == experts.functions


def _shapes_of(module: nn.Module, layout: Layout) -> tuple[object, ...]:
    """Return the shapes of both weights, which pruning changes; None for one that is no parameter."""
    weights = (module._parameters.get(name) for name in (_up(layout), "down_proj"))
    return tuple([None if weight is None else weight.shape for weight in weights])


@constant_in_graphs
def _let_prepare(experts_class: type[nn.Module]) -> None:
    """Make `_fusedmoe_prepare` a method: Dynamo passes the module to a constant method, not to a constant function."""
    experts_class._fusedmoe_prepare = _fusedmoe_prepare  # type: ignore[attr-defined]


@constant_in_graphs
def _fusedmoe_prepare(module: nn.Module) -> None:
    experts: Experts | None = module.__dict__.get(OPS)
    if experts is None or not _is_current(module, experts):
        module.__dict__[OPS] = _new_experts(module)


def _new_experts(module: nn.Module) -> Experts:
    layout = layout_of(module)
    names = tuple(name for name in (*_LAYOUT_SETTINGS, *SETTINGS) if hasattr(module, name))
    weight_type = type(module._parameters.get("down_proj"))
    weight_dtype: torch.dtype = module.down_proj.dtype  # type: ignore[assignment]
    depends_on = (
        names, settings_of(module, names), functions_of(module), _shapes_of(module, layout), weight_type, weight_dtype,
    )  # fmt: skip
    if _runs_as_stock(module, layout):
        if RANKS in module.__dict__:
            remedy = "or pass ep_implementation='all_to_all'"
            raise InputError(
                f"{runs_as_stock(module, layout)}, {remedy}, since fusedmoe exchanges the tokens of its own chains"
            )
        say_once(logger, logging.WARNING, "%s", runs_as_stock(module, layout))
        return Experts(Sequential(), layout, *depends_on, _stock(module))
    chain, router = _chain(module, layout), module.__dict__.get(ROUTER)
    routed = None if router is None else Sequential(OrderedDict(router=router.found.op, **chain._modules))
    return Experts(chain, layout, *depends_on, routed=routed)


def _chain(module: nn.Module, layout: Layout) -> Sequential:
    up, down = (_shape(weight, layout) for weight in _weights(module, layout))
    experts, wide, hidden = up
    intermediate = down[-1]
    factor = 2 if layout.gated else 1
    if wide != factor * intermediate or down != (experts, hidden, intermediate):
        raise InputError(
            f"{type(module).__name__}: expected weights ({experts}, {factor} * I, H) and ({experts}, H, I), "
            f"got {up} and {down}"
        )
    ranks = module.__dict__.get(RANKS)
    activation = recognised(module, layout)
    if activation is None:
        message = "%s: %s is none of the activations that can be fused, so it runs unfused between the two products"
        say_once(logger, logging.WARNING, message, type(module).__name__, _name_of_activation(module, layout))
    # scale after the activation, where it fuses, if all later ops are linear; otherwise in the combine
    early = activation is not None and not layout.biased and not layout.normed
    how: dict[str, Any] = {"bias": layout.biased, "device": "meta"}
    if layout.fp8:
        # checkpoints with scales that are powers of two, in E8M0, are for such scales of activations too
        how["weight_format"] = fp8_block(across=128, power_of_two=module.down_proj_scale_inv.dtype is not torch.float32)
    ops: dict[str, Any] = {
        "dispatch": Dispatch(number_of_all_experts(module), expert_parallel=ranks),
        "input": Scale("probs") if layout.scales_input else None,
        "gate_up": made_untraced(GroupedLinear, experts, hidden, wide, **how),
        "activation": activation or ModelFunction(module, activation_of),
        "weight": Scale("probs") if early and not layout.scales_input else None,
        "down": made_untraced(GroupedLinear, experts, intermediate, hidden, **how),
        "norm": ModelFunction(module, _norm) if layout.normed else None,
        "combine": Combine(None if early or layout.scales_input else "probs", expert_parallel=ranks),
    }
    ops["gate_up"].transposed_grad = ops["down"].transposed_grad = layout.transposed
    return Sequential(OrderedDict((name, op) for name, op in ops.items() if op is not None)).without_parameters()


# ---- quantized weights --------------------------------------------------------------------------------------------


def _quantized_to(module: nn.Module, layout: Layout) -> str:
    """Return the dtype or the tensor class of a module's quantized weights; "" if they are not quantized."""
    weights: tuple[Any, Any] = _weights(module, layout)
    for weight in weights:
        if is_traceable_wrapper_subclass(weight):
            return type(weight).__name__
        if weight.dtype not in _DTYPES:
            return str(weight.dtype)
    return ""


def is_quantized(module: nn.Module) -> bool:
    """Whether the weights of a module are quantized."""
    return bool(_quantized_to(module, layout_of(module)))


def _runs_as_stock(module: nn.Module, layout: Layout) -> bool:
    """Whether transformers runs a module, because of its quantized weights."""
    return not layout.fp8 and bool(_quantized_to(module, layout))


def _why_not_fp8(module: Any, layout: Layout) -> str:
    """Return why the weights of a module cannot be multiplied in FP8 as they are stored; "" if they can."""
    if not _is_a(module, "FP8Experts"):
        return "fusedmoe has no kernels for it"
    scheme, block = (getattr(module, name, None) for name in ("activation_scheme", "block_size"))
    if scheme != "dynamic":
        return f"expected dynamic scales of activations, got {scheme!r}"
    if block is None or tuple(block) != (128, 128):
        return f"expected blocks of 128 x 128, got {block}"
    weights: tuple[Any, Any] = _weights(module, layout)
    for name, weight in zip((_up(layout), "down_proj"), weights, strict=True):
        if is_traceable_wrapper_subclass(weight) or weight.dtype is not torch.float8_e4m3fn:
            return f"{name}: expected codes in torch.float8_e4m3fn, got {weight.dtype}"
        scale: Tensor = _local(getattr(module, f"{name}_scale_inv"))
        experts, rows, columns = weight.shape
        expected = experts, -(-rows // 128), -(-columns // 128)
        if tuple(scale.shape) != expected or scale.dtype not in (torch.float32, torch.float8_e8m0fnu):
            got = f"{tuple(scale.shape)} in {scale.dtype}"
            return f"{name}_scale_inv: expected {expected} in torch.float32 or torch.float8_e8m0fnu, got {got}"
    return ""


def _stock(module: nn.Module) -> Callable[..., Tensor]:
    """Return transformers' forward of a module with quantized weights."""
    if _is_a(module, "FP8Experts") and getattr(module, "activation_scheme", "") != "static":
        from transformers.integrations.finegrained_fp8 import fp8_grouped_mm_experts_forward

        return fp8_grouped_mm_experts_forward  # the default of transformers
    if is_llama4(module):  # its forward takes other arguments
        raise InputError(f"{type(module).__name__}: expected weights that are not quantized")
    # without the decorator, which FP8Experts has once per layer
    forward: Callable[..., Tensor] = inspect.unwrap(type(module).forward)
    return forward


def runs_as_stock(module: nn.Module, layout: Layout) -> str:
    """Return the message for a module with quantized weights."""
    return (
        f"{type(module).__name__}: its weights are quantized to {_quantized_to(module, layout)}, and transformers runs "
        f"it without fusedmoe: {_why_not_fp8(module, layout)}. To use fusedmoe, load the model dequantized"
    )


# ---- the activation -----------------------------------------------------------------------------------------------


def activation_of(module: Any, x: Tensor) -> Tensor:
    """Compute the function between the two products of a module."""
    if not _setting(module, "has_gate", True):
        return module.act_fn(x)  # type: ignore[no-any-return]
    if hasattr(module, GATE):
        return module._apply_gate(x)  # type: ignore[no-any-return]
    gate, up = x.chunk(2, dim=-1)  # transformers' default
    return module.act_fn(gate) * up  # type: ignore[no-any-return]


def recognised(module: nn.Module, layout: Layout) -> Op | None:
    """Return the op that computes `activation_of`; None if it is not recognised."""
    intermediate = _shape(_weights(module, layout)[1], layout)[-1]
    return recognise(module, activation_of, RowLayout(layout.gated, layout.interleaved, intermediate))


def _name_of_activation(module: nn.Module, layout: Layout) -> str:
    """Return the name of a module's own gate, or of the function in transformers' default gate."""
    gate = vars(module).get(GATE, getattr(type(module), GATE, None))
    if layout.gated and gate is not None and getattr(gate, "__module__", None) != "transformers.integrations.moe":
        return GATE
    function = getattr(module, "act_fn", None)
    return f"act_fn, {getattr(function, '__name__', type(function).__name__)},"


def _norm(module: Any, x: Tensor) -> Tensor:
    return module.post_expert_norm(x)  # type: ignore[no-any-return]


class ModelFunction(nn.Module):
    """A function of the model that has no op."""

    def __init__(self, module: nn.Module, function: Any) -> None:
        super().__init__()
        self.__dict__["_module"] = module  # as a submodule, it would contain itself
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._function(self.__dict__["_module"], x)
        return y


# ---- layout and parameters ----------------------------------------------------------------------------------------


def layout_of(module: nn.Module) -> Layout:
    """Return a module's layout."""
    if is_llama4(module):
        return Layout(True, interleaved=False, transposed=True, biased=False, normed=False, scales_input=True)
    gated = _setting(module, "has_gate", True)
    layout = Layout(
        gated,
        interleaved=gated and not _setting(module, "is_concatenated", True),
        transposed=_setting(module, "is_transposed", False),
        biased=_setting(module, "has_bias", False),
        normed=_setting(module, "has_post_expert_norm", False),
        scales_input=False,
    )
    return layout._replace(fp8=not _why_not_fp8(module, layout))


def parameters_of(module: nn.Module, layout: Layout) -> dict[str, Tensor | None]:
    """Return this rank's parameters in the ops' layout, (E, out, in)."""
    up, down = _weights(module, layout)
    if layout.fp8:
        stored = {"gate_up.weight": up, "gate_up.weight_scale_inv": getattr(module, f"{_up(layout)}_scale_inv")}
        stored |= {"down.weight": down, "down.weight_scale_inv": module.down_proj_scale_inv}
        return {name: _frozen(parameter) for name, parameter in stored.items()}
    if layout.transposed:
        up, down = up.mT, down.mT
    up_bias = down_bias = None
    if layout.biased:
        up_bias, down_bias = _local(getattr(module, f"{_up(layout)}_bias")), _local(module.down_proj_bias)
    return {"gate_up.weight": up, "down.weight": down, "gate_up.bias": up_bias, "down.bias": down_bias}


def _frozen(parameter: Any) -> Tensor:
    """Return codes or scales of weights in FP8: without a gradient, as in transformers; scales in fp32."""
    t = _local(parameter)
    t = t.detach() if t.requires_grad else t
    return t.float() if t.dtype is torch.float8_e8m0fnu else t


def number_of_experts(module: nn.Module) -> int:
    """Return the number of experts of this rank."""
    return int(module.num_experts)  # type: ignore[arg-type]


def number_of_all_experts(module: nn.Module) -> int:
    """Return the number of experts that the tokens of a module choose from: those of all ranks that share them."""
    ranks: ExpertParallel | None = module.__dict__.get(RANKS)
    return number_of_experts(module) * (1 if ranks is None else ranks.ranks)


def top_k_of(module: nn.Module) -> int | None:
    """Return the experts per token from the configuration of an experts module; None if it has no such field."""
    found = (getattr(owner, name, None) for owner in (module, getattr(module, "config", None)) for name in TOP_K)
    return next((k for k in found if isinstance(k, int)), None)


def is_llama4(module: nn.Module) -> bool:
    """Whether a module is Llama-4's experts, which are not in transformers' experts interface."""
    return _is_a(module, "Llama4TextExperts")


def _is_a(module: nn.Module, name: str) -> bool:
    return any(c.__name__ == name for c in type(module).__mro__)


def _setting(module: nn.Module, name: str, default: bool) -> bool:
    return bool(getattr(module, name, default))


def _up(layout: Layout) -> str:
    return "gate_up_proj" if layout.gated else "up_proj"


def _weights(module: nn.Module, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return this rank's weights in the module's layout."""
    return _local(getattr(module, _up(layout))), _local(module.down_proj)


def _shape(weight: Tensor, layout: Layout) -> tuple[int, ...]:
    """Return (E, out, in) of a stored weight, without an operator, which `torch.export` would record."""
    experts, rows, columns = weight.shape
    return (experts, columns, rows) if layout.transposed else (experts, rows, columns)


def _local(parameter: Any) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter  # type: ignore[no-any-return]
