"""Experts of Hugging Face transformers: after `register`, every model takes ``experts_implementation="fusedmoe"``.

    import fusedmoe.integrations.transformers as fusedmoe_transformers

    fusedmoe_transformers.register()
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", experts_implementation="fusedmoe")

Parameters, ``state_dict``, router and auxiliary losses stay the model's. `gates` recognises the function between the
two products of the experts and returns the op that computes it. A gate that is not recognised runs as it is, between
the two products, and a WARNING says so once.

Llama-4's experts are no experts of that interface: `patch_llama4`.

Experts whose weights are quantized (transformers' ``FP8Experts``, tensor subclasses such as torchao's) run as
transformers runs them without this package, and a WARNING says so once.

Source of the interface: ``transformers.integrations.moe``, transformers 5.7 and later.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusedmoe.checks import MODULE, POSITIVE_INTEGER, TEXT
from fusedmoe.errors import InputError
from fusedmoe.explain_model import register_explainer
from fusedmoe.extras import install_command
from fusedmoe.integrations.gates import GATE, SETTINGS, RowLayout, functions_of, recognise, settings_of
from fusedmoe.log import say_once
from fusedmoe.ops import Combine, Dispatch, GroupedLinear, Op, Scale
from fusedmoe.ops.op import constant_in_graphs, made_untraced
from fusedmoe.sequential import Sequential

if TYPE_CHECKING:
    from collections.abc import Callable

    from fusedmoe.fusion.plan import Explanation

logger = logging.getLogger(__name__)

NAME = "fusedmoe"


def register(name: str = NAME) -> None:
    """Make ``experts_implementation=name`` known to transformers: in ``from_pretrained``, in ``from_config`` and in
    ``model.set_experts_implementation``. Twice is once.

    Raises
    ------
    ImportError
        transformers is not installed, or older than 5.7.
    """
    TEXT("register: name", name)
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError as error:
        raise ImportError(f"register() needs transformers 5.7 or newer: {install_command('transformers')}") from error

    ExpertsInterface.register(name, experts_forward)
    try:
        from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    except ImportError:  # it is no public name
        return
    FP8ExpertsInterface.register(name, experts_forward)


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *args: object, **kwargs: object
) -> Tensor:
    """``y[t] = sum over k of w[t, k] * expert[index[t, k]](x[t])``: what transformers calls in the experts' stead.

    Parameters
    ----------
    self
        The experts module: a class that carries transformers' ``use_experts_implementation``.
    hidden_states
        (T, H).
    top_k_index
        (T, K) integers; ``num_experts`` for a slot that another rank computes.
    top_k_weights
        (T, K).

    Returns
    -------
    Tensor
        (T, H), in the dtype of ``hidden_states``.
    """
    if args or kwargs:
        raise InputError(
            f"{type(self).__name__}: expected hidden_states, top_k_index and top_k_weights, "
            f"got {len(args)} more and {', '.join(kwargs) or 'no others by name'}"
        )
    experts = _experts_of(self)
    if experts.stock is not None:
        return experts.stock(self, hidden_states, top_k_index, top_k_weights)
    parameters = _parameters(self, experts.layout)
    x = hidden_states
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(parameters["down.weight"].dtype)  # type: ignore[union-attr]
    y = experts.chain.forward_with(parameters, x, expert_index=top_k_index, expert_weight=top_k_weights)
    return y.to(hidden_states.dtype)


def explain(
    module: nn.Module, tokens: int = 4096, top_k: int | None = None, arch: int | str | None = None
) -> Explanation:
    """Return what an experts module does with a call of ``tokens`` tokens that are routed evenly: ``print`` it.

    Parameters
    ----------
    module
        An experts module, as in `experts_forward`.
    tokens
        T.
    top_k
        K; by default that of the model's configuration, under the name that its family has for it.
    arch
        As for `Sequential.explain`: 90 for what an sm_90 GPU would run.

    Raises
    ------
    InputError
        The module is none whose experts can run here, or nobody says K.
    """
    tokens, top_k = POSITIVE_INTEGER("explain: tokens", tokens), POSITIVE_INTEGER.or_none()("explain: top_k", top_k)
    experts = _experts_of(module)
    if experts.stock is not None:
        raise InputError(_runs_as_stock(module, experts.layout))
    parameters = _parameters(module, experts.layout)
    weight = parameters["down.weight"]
    assert weight is not None
    if len(weight) != _number_of_experts(module):
        raise InputError(
            f"{type(module).__name__}: expected weights of {_number_of_experts(module)} experts, got {len(weight)}: "
            f"where they are sharded and gathered in a call, plan before that"
        )
    chosen = top_k or top_k_of(module)
    if chosen is None:
        raise InputError(
            f"{type(module).__name__}: top_k: expected the number of experts per token, got None, and the model's "
            f"configuration has none of {', '.join(_TOP_K)}"
        )
    kind = weight.device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    how: dict[str, Any] = {"device": weight.device, "requires_grad": torch.is_grad_enabled()}
    x = torch.zeros(tokens, weight.shape[1], dtype=torch.get_autocast_dtype(kind) if autocast else weight.dtype, **how)
    slots = torch.arange(tokens * chosen, device=weight.device).view(tokens, chosen)
    weights = torch.ones(tokens, chosen, **how)
    index = slots % _number_of_experts(module)
    return experts.chain.explain_with(parameters, x, arch=arch, expert_index=index, expert_weight=weights)


_TOP_K = "num_experts_per_tok", "top_k_experts", "moe_topk"  # what configurations call K


def top_k_of(module: nn.Module) -> int | None:
    """Return the experts per token of an experts module, as the model's configuration says; None if it does not."""
    found = (getattr(owner, name, None) for owner in (module, getattr(module, "config", None)) for name in _TOP_K)
    return next((k for k in found if isinstance(k, int)), None)


def recognised(module: nn.Module) -> Op | None:
    """Return the op that computes what an experts module computes between its products; None if there is none.

    `fusedmoe.integrations.gates.recognise` says how it is found.
    """
    layout = _layout(module)
    down = _parameters(module, layout)["down.weight"]
    assert down is not None
    return _recognise_activation(module, layout, down.shape[-1])


def runs_here(module: nn.Module) -> bool:
    """Whether it is an experts module whose calls come to `experts_forward`."""
    if _is_partial_of(vars(module).get("forward"), (experts_forward,)):
        return True
    name = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if name is None or not hasattr(module, "is_transposed"):  # which the decorator sets
        return False
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ALL_EXPERTS_FUNCTIONS.get(name) is experts_forward


@register_explainer
def _explained(module: nn.Module, tokens: int) -> Explanation | None:
    return explain(module, tokens) if runs_here(module) else None


# ---- Llama-4 ------------------------------------------------------------------------------------------------------


def patch_llama4(model: nn.Module) -> int:
    """Have every ``Llama4TextMoe`` in a model compute ``y = shared_expert(x) + sum over k of expert[k](x * s[k])``, s
    being the router's scores, for the chosen experts alone; return how many layers do. Twice is once.

    As it is, the layer runs every expert on every token, most of them on zeros. `unpatch_llama4` is the way back.

    Raises
    ------
    InputError
        The model has no such layer, the experts of one are quantized, or somebody else has replaced its ``forward``.
    """
    layers = _llama4_layers(MODULE("patch_llama4: model", model))
    if not layers:
        raise InputError(f"patch_llama4: expected a model with Llama4TextMoe layers, got {type(model).__name__}")
    ours = (_llama4_forward, experts_forward)
    for name, layer in layers:
        if not _is_llama4(layer.experts) or _quantized_to(layer.experts, _layout(layer.experts)):
            got = type(layer.experts).__name__
            raise InputError(f"patch_llama4: {name}.experts: expected {got} with weights that are not quantized")
        for module in (layer, layer.experts):
            replaced = vars(module).get("forward")
            if replaced is not None and not _is_partial_of(replaced, ours):
                raise InputError(f"patch_llama4: the forward of {name!r} was replaced before by {replaced!r}")
    for _, layer in layers:
        # on the instances, as copies and pickles of a partial know their own module; each is called as a module still
        layer.forward = functools.partial(_llama4_forward, layer)
        layer.experts.forward = functools.partial(experts_forward, layer.experts)
        layer.experts.num_experts_per_tok = layer.top_k  # they have no configuration to ask
    return len(layers)


def unpatch_llama4(model: nn.Module) -> int:
    """Undo `patch_llama4`; return in how many layers."""
    undone = 0
    for _, layer in _llama4_layers(MODULE("unpatch_llama4: model", model)):
        if _is_partial_of(vars(layer).get("forward"), (_llama4_forward,)):
            del layer.forward, layer.experts.forward, layer.experts.num_experts_per_tok
            undone += 1
    return undone


def _llama4_layers(model: nn.Module) -> list[tuple[str, Any]]:
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    return [(name, module) for name, module in model.named_modules() if isinstance(module, Llama4TextMoe)]


def _is_partial_of(function: object, functions: tuple[object, ...]) -> bool:
    return isinstance(function, functools.partial) and function.func in functions


def _llama4_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Return the layer's output (T, H) and the router's logits (T, E)."""
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)  # (T, E): zero for every expert that was not chosen
    weights, index = scores.topk(self.top_k, dim=-1)
    return self.shared_expert(x) + self.experts(x, index, weights), logits


# ---- the ops of an experts module ---------------------------------------------------------------------------------


class Layout(NamedTuple):
    """How an experts module lays out its parameters, and what it does with the rows besides its products."""

    gated: bool
    interleaved: bool  # gate and up alternate
    transposed: bool  # weights are (E, in, out)
    biased: bool
    normed: bool  # after the experts
    scales_input: bool  # the routing weight multiplies what goes into an expert, not what comes out


class Experts(NamedTuple):
    """The ops that an experts module runs, and what they were made from."""

    chain: Sequential
    layout: Layout
    names: tuple[str, ...]  # of the attributes that the ops depend on
    settings: tuple[object, ...]
    functions: tuple[object, ...]
    weight_type: type
    weight_dtype: torch.dtype
    stock: Callable[..., Tensor] | None = None  # what runs instead, where weights are quantized

    def __reduce__(self) -> Any:
        return _none, ()  # a copy of the module makes its own


def _none() -> None:
    return None


_OPS = "_fusedmoe_experts"  # beside the module's own attributes, not among its submodules: no state_dict has them


def _experts_of(module: nn.Module) -> Experts:
    """Return a module's ops: those made before, if it has not changed since."""
    if torch.compiler.is_compiling():
        # when the graph is traced; the comparison below makes guards of what the ops depend on
        _let_prepare(type(module))
        module._fusedmoe_prepare()  # type: ignore[operator]
        experts: Experts = module.__dict__[_OPS]
        if settings_of(module, experts.names) == experts.settings:
            return experts
    found: Experts | None = module.__dict__.get(_OPS)
    if found is None or not _holds(module, found):
        _fusedmoe_prepare(module)
        found = module.__dict__[_OPS]
    return found


def _holds(module: nn.Module, experts: Experts) -> bool:
    weight = module._parameters.get("down_proj")
    if type(weight) is not experts.weight_type or (weight is not None and weight.dtype is not experts.weight_dtype):
        is_quantized = bool(_quantized_to(module, experts.layout))
        if is_quantized is not (experts.stock is not None):
            return False
    return settings_of(module, experts.names) == experts.settings and functions_of(module) == experts.functions


@constant_in_graphs
def _let_prepare(experts_class: type[nn.Module]) -> None:
    """Make the function below a method: of functions that are constants, Dynamo hands only methods their module."""
    experts_class._fusedmoe_prepare = _fusedmoe_prepare  # type: ignore[attr-defined]


@constant_in_graphs
def _fusedmoe_prepare(module: nn.Module) -> None:
    """Make a module's ops, and keep them on it."""
    experts: Experts | None = module.__dict__.get(_OPS)
    if experts is None or not _holds(module, experts):
        module.__dict__[_OPS] = _new_experts(module)


def _new_experts(module: nn.Module) -> Experts:
    layout = _layout(module)
    names = tuple(name for name in (*_LAYOUT_SETTINGS, *SETTINGS) if hasattr(module, name))
    depends_on = names, settings_of(module, names), functions_of(module), *_weight_kind(module)
    if _quantized_to(module, layout):
        say_once(logger, logging.WARNING, "%s", _runs_as_stock(module, layout))
        return Experts(Sequential(), layout, *depends_on, _stock(module))
    up, down = (_shape(weight, layout) for weight in _weights(module, layout))
    experts, wide, hidden = up
    intermediate = down[-1]
    factor = 2 if layout.gated else 1
    if wide != factor * intermediate or down != (experts, hidden, intermediate):
        raise InputError(
            f"{type(module).__name__}: expected weights ({experts}, {factor} * I, H) and ({experts}, H, I), "
            f"got {up} and {down}"
        )
    found = _recognise_activation(module, layout, intermediate)
    if found is None:
        message = "%s: %s is none of the activations that can be fused; it runs as it is, between the two products"
        say_once(logger, logging.WARNING, message, type(module).__name__, _name_of_activation(module, layout))
    # the routing weight goes into the activation's epilogue where all that follows is linear in it; else into the sum
    early = found is not None and not layout.biased and not layout.normed
    ops: dict[str, Any] = {
        "dispatch": Dispatch(_number_of_experts(module)),
        "input": Scale("probs") if layout.scales_input else None,
        "gate_up": made_untraced(GroupedLinear, experts, hidden, wide, bias=layout.biased, device="meta"),
        "activation": found or _AsItIs(module, _activation),
        "weight": Scale("probs") if early and not layout.scales_input else None,
        "down": made_untraced(GroupedLinear, experts, intermediate, hidden, bias=layout.biased, device="meta"),
        "norm": _AsItIs(module, _norm) if layout.normed else None,
        "combine": Combine(None if early or layout.scales_input else "probs"),
    }
    chain = Sequential(OrderedDict((name, op) for name, op in ops.items() if op is not None)).without_parameters()
    return Experts(chain, layout, *depends_on)


_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _quantized_to(module: nn.Module, layout: Layout) -> str:
    """Return what a module's weights are quantized to: a dtype or a class of tensors; "" where they are not."""
    weights: tuple[Any, Any] = _weights(module, layout)
    for weight in weights:
        if is_traceable_wrapper_subclass(weight):
            return type(weight).__name__
        if weight.dtype not in _DTYPES:
            return str(weight.dtype)
    return ""


def _weight_kind(module: nn.Module) -> tuple[type, torch.dtype]:
    """Return what tells cheaply that a weight may have been quantized since: see `_holds`."""
    return type(module._parameters.get("down_proj")), module.down_proj.dtype  # type: ignore[return-value]


def _stock(module: nn.Module) -> Callable[..., Tensor]:
    """Return what runs a module with quantized weights in transformers."""
    if _is_a(module, "FP8Experts") and getattr(module, "activation_scheme", "") != "static":
        from transformers.integrations.finegrained_fp8 import fp8_grouped_mm_experts_forward

        return fp8_grouped_mm_experts_forward  # as without experts_implementation
    if _is_llama4(module):  # its own forward takes other arguments
        raise InputError(f"{type(module).__name__}: expected weights that are not quantized")
    # without the decorator, which FP8Experts has once for each layer
    forward: Callable[..., Tensor] = inspect.unwrap(type(module).forward)
    return forward


def _runs_as_stock(module: nn.Module, layout: Layout) -> str:
    return (
        f"{type(module).__name__}: its weights are quantized to {_quantized_to(module, layout)}, which fusedmoe "
        f"has no kernels for: it runs as in transformers without fusedmoe. Load the model dequantized to run it here"
    )


def _name_of_activation(module: nn.Module, layout: Layout) -> str:
    """Return where a module has its activation from: a gate of its own, or a function in transformers' own."""
    gate = vars(module).get(GATE, getattr(type(module), GATE, None))
    if layout.gated and gate is not None and getattr(gate, "__module__", None) != "transformers.integrations.moe":
        return GATE
    function = getattr(module, "act_fn", None)
    return f"act_fn, {getattr(function, '__name__', type(function).__name__)},"


def _recognise_activation(module: nn.Module, layout: Layout, intermediate: int) -> Op | None:
    return recognise(module, _activation, RowLayout(layout.gated, layout.interleaved, intermediate))


_LAYOUT_SETTINGS = (
    "num_experts", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated",
)  # fmt: skip


def _layout(module: nn.Module) -> Layout:
    if _is_llama4(module):
        return Layout(True, interleaved=False, transposed=True, biased=False, normed=False, scales_input=True)
    gated = _setting(module, "has_gate", True)
    return Layout(
        gated,
        interleaved=gated and not _setting(module, "is_concatenated", True),
        transposed=_setting(module, "is_transposed", False),
        biased=_setting(module, "has_bias", False),
        normed=_setting(module, "has_post_expert_norm", False),
        scales_input=False,
    )


def _is_llama4(module: nn.Module) -> bool:
    return _is_a(module, "Llama4TextExperts")


def _is_a(module: nn.Module, name: str) -> bool:
    return any(c.__name__ == name for c in type(module).__mro__)


def _setting(module: nn.Module, name: str, default: bool) -> bool:
    return bool(getattr(module, name, default))


def _number_of_experts(module: nn.Module) -> int:
    return int(module.num_experts)  # type: ignore[arg-type]  # of this rank, under expert parallelism


def _parameters(module: nn.Module, layout: Layout) -> dict[str, Tensor | None]:
    """Return the parameters as the ops take them: (E, out, in), those of this rank."""
    weights = _weights(module, layout)
    if layout.transposed:
        weights = weights[0].mT, weights[1].mT
    up = f"{_up(layout)}_bias"
    biases = (_local(getattr(module, up)), _local(module.down_proj_bias)) if layout.biased else (None, None)
    return dict(zip(_NAMES, (*weights, *biases), strict=True))


def _up(layout: Layout) -> str:
    return "gate_up_proj" if layout.gated else "up_proj"


def _weights(module: nn.Module, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return the weights as the module stores them, those of this rank."""
    return _local(getattr(module, _up(layout))), _local(module.down_proj)


def _shape(weight: Tensor, layout: Layout) -> tuple[int, ...]:
    """Return (E, out, in) of a stored weight, by no operator: it would be in a program that is being exported."""
    experts, rows, columns = weight.shape
    return (experts, columns, rows) if layout.transposed else (experts, rows, columns)


_NAMES = ("gate_up.weight", "down.weight", "gate_up.bias", "down.bias")


def _local(parameter: Any) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter  # type: ignore[no-any-return]


class _AsItIs(nn.Module):
    """What a model computes after a product, if it is nothing that has an op here."""

    def __init__(self, module: nn.Module, function: Any) -> None:
        super().__init__()
        self.__dict__["_module"] = module  # not a submodule of its own submodule
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._function(self.__dict__["_module"], x)
        return y


def _activation(module: Any, x: Tensor) -> Tensor:
    """Return what an experts module computes between its products."""
    if not _setting(module, "has_gate", True):
        return module.act_fn(x)  # type: ignore[no-any-return]
    if hasattr(module, GATE):
        return module._apply_gate(x)  # type: ignore[no-any-return]
    gate, up = x.chunk(2, dim=-1)  # as transformers has it for experts that define none
    return module.act_fn(gate) * up  # type: ignore[no-any-return]


def _norm(module: Any, x: Tensor) -> Tensor:
    return module.post_expert_norm(x)  # type: ignore[no-any-return]
