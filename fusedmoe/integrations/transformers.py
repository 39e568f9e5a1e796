"""Experts of Hugging Face transformers: after `register`, every model takes ``experts_implementation="fusedmoe"``.

    import fusedmoe.integrations.transformers as fusedmoe_transformers

    fusedmoe_transformers.register()
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", experts_implementation="fusedmoe")

Parameters, ``state_dict``, router and auxiliary losses stay the model's. What the experts compute between their two
products is found out from the model: its gate is tried on numbers, in fp64, and taken for one of the activations here
only if it gives what that gives. Any other gate runs as it is, between the two products, and says so once.

Source of the interface: ``transformers.integrations.moe``, transformers 5.7 and later.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedmoe.errors import InputError
from fusedmoe.fusion.log import say_once
from fusedmoe.ops import Combine, Dispatch, GeGLU, GroupedLinear, Op, ReGLU, Scale, SquaredReLU, SwiGLU
from fusedmoe.ops.op import constant_in_graphs
from fusedmoe.sequential import Sequential

if TYPE_CHECKING:
    from fusedmoe.fusion.plan import Explanation

logger = logging.getLogger(__name__)

NAME = "fusedmoe"


def register(name: str = NAME) -> None:
    """Make ``experts_implementation=name`` known to transformers: in ``from_pretrained``, in ``from_config`` and in
    ``model.set_experts_implementation``. Twice is once.
    """
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(name, experts_forward)


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
    parameters = _parameters(self)
    x = hidden_states
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(parameters["down.weight"].dtype)  # type: ignore[union-attr]
    y = experts.chain.forward_with(parameters, x, expert_index=top_k_index, expert_weight=top_k_weights)
    return y.to(hidden_states.dtype)


def explain(module: nn.Module, tokens: int = 4096, top_k: int | None = None) -> Explanation:
    """Return what an experts module does with a call of ``tokens`` tokens that are routed evenly: ``print`` it.

    Parameters
    ----------
    module
        An experts module, as in `experts_forward`.
    tokens
        T.
    top_k
        K; by default ``num_experts_per_tok`` of the model's configuration.
    """
    experts, parameters = _experts_of(module), _parameters(module)
    weight = parameters["down.weight"]
    assert weight is not None
    config = getattr(module, "config", None)
    chosen = top_k or getattr(config, "num_experts_per_tok", None) or 2
    dtype = (
        torch.get_autocast_dtype(weight.device.type) if torch.is_autocast_enabled(weight.device.type) else weight.dtype
    )
    x = torch.zeros(tokens, weight.shape[1], dtype=dtype, device=weight.device, requires_grad=torch.is_grad_enabled())
    slots = torch.arange(tokens * chosen, device=weight.device).view(tokens, chosen)
    weights = torch.ones(tokens, chosen, device=weight.device, requires_grad=torch.is_grad_enabled())
    index = slots % _number_of_experts(module)
    return experts.chain.explain_with(parameters, x, expert_index=index, expert_weight=weights)


class Experts(NamedTuple):
    """The ops that an experts module runs, and the settings that they were made from."""

    chain: Sequential
    state: tuple[object, ...]
    names: tuple[str, ...]


_OPS = "_fusedmoe_experts"  # beside the module's own attributes, not among its submodules: no state_dict has them


def _experts_of(module: nn.Module) -> Experts:
    """Return a module's ops: those made before, if it has not changed since."""
    if torch.compiler.is_compiling():
        # when the graph is traced; the comparison below makes guards of what the ops depend on
        _let_prepare(type(module))
        module._fusedmoe_prepare()  # type: ignore[operator]
    experts: Experts | None = module.__dict__.get(_OPS)
    if experts is None or _state(module, experts.names) != experts.state:
        _fusedmoe_prepare(module)
        experts = module.__dict__[_OPS]
    return experts


def _state(module: nn.Module, names: tuple[str, ...]) -> tuple[object, ...]:
    return tuple([getattr(module, name, None) for name in names])


@constant_in_graphs
def _let_prepare(experts_class: type[nn.Module]) -> None:
    """Make the function below a method: of functions that are constants, Dynamo hands only methods their module."""
    experts_class._fusedmoe_prepare = _fusedmoe_prepare  # type: ignore[assignment]


@constant_in_graphs
def _fusedmoe_prepare(module: nn.Module) -> None:
    """Make a module's ops, and keep them on it."""
    experts: Experts | None = module.__dict__.get(_OPS)
    if experts is None or _state(module, experts.names) != experts.state:
        names = tuple(name for name, value in vars(module).items() if name[0] != "_" and isinstance(value, _PLAIN))
        module.__dict__[_OPS] = Experts(_chain(module), _state(module, names), names)


_PLAIN = (bool, int, float, str)


def _chain(module: nn.Module) -> Sequential:
    """Return the ops of an experts module, which take its parameters at each call."""
    parameters = _parameters(module)
    up, down = parameters["gate_up.weight"], parameters["down.weight"]
    assert up is not None
    assert down is not None
    experts, wide, hidden = up.shape
    intermediate = down.shape[-1]
    gated = _setting(module, "has_gate", True)
    if wide != (2 if gated else 1) * intermediate or down.shape != (experts, hidden, intermediate):
        raise InputError(
            f"{type(module).__name__}: expected weights ({experts}, {2 if gated else 1} * I, H) and ({experts}, H, I), "
            f"got {tuple(up.shape)} and {tuple(down.shape)}"
        )
    activation = recognised(module)
    bias = parameters["down.bias"] is not None
    norm = module.post_expert_norm if _setting(module, "has_post_expert_norm", False) else None
    # the routing weight goes into the activation's epilogue where all that follows is linear in it; else into the sum
    weighted_early = activation is not None and not bias and norm is None
    ops: dict[str, Any] = {
        "dispatch": Dispatch(_number_of_experts(module)),
        "gate_up": GroupedLinear(experts, hidden, wide, bias=parameters["gate_up.bias"] is not None, device="meta"),
        "activation": _AsItIs(module, gated) if activation is None else activation,
        "weight": Scale("probs") if weighted_early else None,
        "down": GroupedLinear(experts, intermediate, hidden, bias=bias, device="meta"),
        "norm": norm,
        "combine": Combine(None if weighted_early else "probs"),
    }
    if activation is None:
        message = "%s: %s is none of the activations that can be fused; it runs as it is, between the two products"
        say_once(logger, logging.WARNING, message, type(module).__name__, "_apply_gate" if gated else "act_fn")
    chain = Sequential(OrderedDict((name, op) for name, op in ops.items() if op is not None))
    return chain.without_parameters()


def _setting(module: nn.Module, name: str, default: bool) -> bool:
    return bool(getattr(module, name, default))


def _number_of_experts(module: nn.Module) -> int:
    return int(module.num_experts)  # type: ignore[arg-type]  # of this rank, under expert parallelism


def _parameters(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the parameters as the ops take them: (E, out, in), those of this rank."""
    gated, biased = _setting(module, "has_gate", True), _setting(module, "has_bias", False)
    up = "gate_up_proj" if gated else "up_proj"
    weights = _local(getattr(module, up)), _local(module.down_proj)
    if _setting(module, "is_transposed", False):
        weights = weights[0].mT, weights[1].mT
    biases = (_local(getattr(module, f"{up}_bias")), _local(module.down_proj_bias)) if biased else (None, None)
    return dict(zip(_NAMES, (*weights, *biases), strict=True))


_NAMES = ("gate_up.weight", "down.weight", "gate_up.bias", "down.bias")


def _local(parameter: Any) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter  # type: ignore[no-any-return]


class _AsItIs(nn.Module):
    """What a model computes between its two products, if it is nothing that has an op here."""

    def __init__(self, module: nn.Module, gated: bool) -> None:
        super().__init__()
        self.__dict__["_module"] = module  # not a submodule of its own submodule
        self._gated = gated

    def forward(self, x: Tensor) -> Tensor:
        module: Any = self.__dict__["_module"]
        y: Tensor = module._apply_gate(x) if self._gated else module.act_fn(x)
        return y


def recognised(module: nn.Module) -> Op | None:
    """Return the op that computes what an experts module computes between its products; None if there is none.

    It is found by trying: the module's function on a grid of gates and ups in fp64, far beyond any bound, against each
    op with each of the module's own numbers for ``limit`` and ``alpha``.
    """
    gated = _setting(module, "has_gate", True)
    function: Any = module._apply_gate if gated else module.act_fn
    rows = _grid(gated)
    interleaved = gated and not _setting(module, "is_concatenated", True)
    if interleaved:
        rows = rows.unflatten(-1, (2, -1)).mT.flatten(-2)
    try:
        with torch.no_grad(), torch.device("cpu"):
            want = function(rows)
    except Exception as error:  # noqa: BLE001  (somebody else's function: it may want a GPU, or its own dtype)
        logger.info("%s: tried on a CPU in fp64, its activation says %r", type(module).__name__, error)
        return None
    numbers = [float(v) for n, v in vars(module).items() if isinstance(v, float | int) and v > 0 and n[0] != "_"]
    for op in _candidates(gated, interleaved, list(dict.fromkeys(numbers))):
        got = op.compute(rows)
        assert isinstance(got, Tensor)
        if got.shape == want.shape and torch.allclose(want.double(), got, rtol=1e-5, atol=1e-6):
            return op
    return None


def _grid(gated: bool) -> Tensor:
    """Return rows that tell any two activations apart: every pair of a gate and an up, small and large."""
    sizes = torch.cat([torch.linspace(0, 12, 49), torch.logspace(1.1, 5, 24)]).double()
    line = torch.cat([-sizes.flip(0), sizes])
    return torch.cartesian_prod(line, line).T.flatten()[None] if gated else line[None]


def _candidates(gated: bool, interleaved: bool, numbers: list[float]) -> list[Op]:
    if not gated:
        return [SquaredReLU()]
    found: list[Op] = []
    for limit in (None, *numbers):
        for offset in (0.0, 1.0):
            shape: dict[str, Any] = {"limit": limit, "offset": offset, "interleaved": interleaved}
            found += [SwiGLU(alpha=alpha, **shape) for alpha in dict.fromkeys((1.0, 1.702, *numbers))]
            found += [GeGLU("tanh", **shape), GeGLU("none", **shape), ReGLU(**shape)]
    return found
