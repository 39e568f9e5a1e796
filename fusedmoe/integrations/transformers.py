"""Experts of Hugging Face transformers: after `register`, every model takes ``experts_implementation="fusedmoe"``.

    import fusedmoe.integrations.transformers as fusedmoe_transformers

    fusedmoe_transformers.register()
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", experts_implementation="fusedmoe")

Parameters, ``state_dict``, router and auxiliary losses stay the model's. What the experts compute between their two
products is found out from the model: its gate is tried on numbers and taken for one of the activations here only if it
gives what that gives. Any other gate runs as it is, between the two products, and says so once.

Llama-4's experts are no experts of that interface: `patch_llama4`.

Source of the interface: ``transformers.integrations.moe``, transformers 5.7 and later.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations as class_of

from fusedmoe.errors import InputError
from fusedmoe.fusion.log import say_once
from fusedmoe.ops import Combine, Dispatch, GeGLU, GroupedLinear, Op, ReGLU, Scale, SquaredReLU, SwiGLU
from fusedmoe.ops.glu import GLU
from fusedmoe.ops.op import constant_in_graphs
from fusedmoe.sequential import Sequential

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    parameters = _parameters(self, experts.layout)
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
    experts = _experts_of(module)
    parameters = _parameters(module, experts.layout)
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


def explained(module: nn.Module, tokens: int) -> tuple[Explanation | None, str] | None:
    """Return what `explain` says of an experts module that runs here, or None and why it says nothing; None of any
    other module.
    """
    if not _runs_here(module):
        return None
    try:
        return explain(module, tokens), ""
    except InputError as error:
        return None, str(error)


def _runs_here(module: nn.Module) -> bool:
    if _is_partial_of(vars(module).get("forward"), (experts_forward,)):
        return True
    name = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if name is None or not hasattr(module, "is_transposed"):  # which the decorator sets
        return False
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ALL_EXPERTS_FUNCTIONS.get(name) is experts_forward


# ---- Llama-4 ------------------------------------------------------------------------------------------------------


def patch_llama4(model: nn.Module) -> int:
    """Have every ``Llama4TextMoe`` in a model compute ``y = shared_expert(x) + sum over k of expert[k](x * s[k])``, s
    being the router's scores, for the chosen experts alone; return how many layers do. Twice is once.

    As it is, the layer runs every expert on every token, most of them on zeros. `unpatch_llama4` is the way back.

    Raises
    ------
    InputError
        The model has no such layer, or somebody else has replaced the ``forward`` of one.
    """
    layers = _llama4_layers(model)
    if not layers:
        raise InputError(f"patch_llama4: expected a model with Llama4TextMoe layers, got {type(model).__name__}")
    ours = (_llama4_forward, experts_forward)
    for name, layer in layers:
        for module in (layer, layer.experts):
            replaced = vars(module).get("forward")
            if replaced is not None and not _is_partial_of(replaced, ours):
                raise InputError(f"patch_llama4: the forward of {name!r} was replaced before by {replaced!r}")
    for _, layer in layers:
        # on the instances, as copies and pickles of a partial know their own module; each is called as a module still
        layer.forward = functools.partial(_llama4_forward, layer)
        layer.experts.forward = functools.partial(experts_forward, layer.experts)
    return len(layers)


def unpatch_llama4(model: nn.Module) -> int:
    """Undo `patch_llama4`; return in how many layers."""
    undone = 0
    for _, layer in _llama4_layers(model):
        if _is_partial_of(vars(layer).get("forward"), (_llama4_forward,)):
            del layer.forward, layer.experts.forward
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
    watched: Watched
    state: tuple[object, ...]
    functions: tuple[object, ...]

    def __reduce__(self) -> Any:
        return _none, ()  # a copy of the module makes its own


Path = tuple[str, ...]
Watched = tuple[tuple[Path, tuple[str, ...], tuple[str, ...]], ...]  # a submodule, its settings, and its functions


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
        if _state(module, experts.watched) == experts.state:
            return experts
    found: Experts | None = module.__dict__.get(_OPS)
    if found is None or not _holds(module, found):
        _fusedmoe_prepare(module)
        found = module.__dict__[_OPS]
    return found


def _holds(module: nn.Module, experts: Experts) -> bool:
    watched = experts.watched
    return _state(module, watched) == experts.state and _functions(module, watched) == experts.functions


def _state(module: nn.Module, watched: Watched) -> tuple[object, ...]:
    """Return the settings that the ops were made from, as they are now."""
    found: list[object] = []
    for path, names, _ in watched:
        part = _at(module, path)
        found.append(None if part is None else class_of(part))  # peft's parametrizations bring a new one a call
        found += [getattr(part, name, None) for name in names]
    return tuple(found)


def _functions(module: nn.Module, watched: Watched) -> tuple[object, ...]:
    """Return the functions that the ops stand for, as they are now, and whether somebody hooks into them."""
    found: list[object] = [getattr(type(module), "_apply_gate", None), vars(module).get("_apply_gate")]
    for path, _, names in watched:
        part = _at(module, path)
        if part is not None and part is not module:
            found += [type(part).forward, vars(part).get("forward"), _hooked(part), tuple(part._modules)]
        found += [getattr(part, name, None) for name in names]
    return tuple(found)


def _at(module: nn.Module, path: Path) -> nn.Module | None:
    part: nn.Module | None = module
    for name in path:
        part = None if part is None else part._modules.get(name)
    return part


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


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
    parameters = _parameters(module, layout)
    up, down = parameters["gate_up.weight"], parameters["down.weight"]
    assert up is not None
    assert down is not None
    experts, wide, hidden = up.shape
    intermediate = down.shape[-1]
    factor = 2 if layout.gated else 1
    if wide != factor * intermediate or down.shape != (experts, hidden, intermediate):
        raise InputError(
            f"{type(module).__name__}: expected weights ({experts}, {factor} * I, H) and ({experts}, H, I), "
            f"got {tuple(up.shape)} and {tuple(down.shape)}"
        )
    activation = recognised(module)
    if activation is None:
        name = "act_fn" if not layout.gated or not hasattr(module, "_apply_gate") else "_apply_gate"
        message = "%s: %s is none of the activations that can be fused; it runs as it is, between the two products"
        say_once(logger, logging.WARNING, message, type(module).__name__, name)
    # the routing weight goes into the activation's epilogue where all that follows is linear in it; else into the sum
    early = activation is not None and not layout.biased and not layout.normed
    ops: dict[str, Any] = {
        "dispatch": Dispatch(_number_of_experts(module)),
        "input": Scale("probs") if layout.scales_input else None,
        "gate_up": GroupedLinear(experts, hidden, wide, bias=layout.biased, device="meta"),
        "activation": _AsItIs(module, _activation) if activation is None else activation,
        "weight": Scale("probs") if early and not layout.scales_input else None,
        "down": GroupedLinear(experts, intermediate, hidden, bias=layout.biased, device="meta"),
        "norm": _AsItIs(module, _norm) if layout.normed else None,
        "combine": Combine(None if early or layout.scales_input else "probs"),
    }
    chain = Sequential(OrderedDict((name, op) for name, op in ops.items() if op is not None)).without_parameters()
    # what runs as it is may change as it likes
    watched = _bare(module)[1] if activation is not None else (((), _LAYOUT_SETTINGS, ()),)
    return Experts(chain, layout, watched, _state(module, watched), _functions(module, watched))


_LAYOUT_SETTINGS = (
    "num_experts", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated",
)  # fmt: skip


def _layout(module: nn.Module) -> Layout:
    if any(c.__name__ == "Llama4TextExperts" for c in type(module).__mro__):
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


def _setting(module: nn.Module, name: str, default: bool) -> bool:
    return bool(getattr(module, name, default))


def _number_of_experts(module: nn.Module) -> int:
    return int(module.num_experts)  # type: ignore[arg-type]  # of this rank, under expert parallelism


def _parameters(module: nn.Module, layout: Layout) -> dict[str, Tensor | None]:
    """Return the parameters as the ops take them: (E, out, in), those of this rank."""
    up = "gate_up_proj" if layout.gated else "up_proj"
    weights = _local(getattr(module, up)), _local(module.down_proj)
    if layout.transposed:
        weights = weights[0].mT, weights[1].mT
    biases = (_local(getattr(module, f"{up}_bias")), _local(module.down_proj_bias)) if layout.biased else (None, None)
    return dict(zip(_NAMES, (*weights, *biases), strict=True))


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
    if hasattr(module, "_apply_gate"):
        return module._apply_gate(x)  # type: ignore[no-any-return]
    gate, up = x.chunk(2, dim=-1)  # as transformers has it for experts that define none
    return module.act_fn(gate) * up  # type: ignore[no-any-return]


def _norm(module: Any, x: Tensor) -> Tensor:
    return module.post_expert_norm(x)  # type: ignore[no-any-return]


# ---- which activation it is ---------------------------------------------------------------------------------------


def recognised(module: nn.Module) -> Op | None:
    """Return the op that computes what an experts module computes between its products; None if there is none.

    It is found by trying, in fp64, fp32 and bf16, values and derivatives: the module's function on every pair of a gate
    and an up, from 1e-18 to 1e18, against each op with each of the module's own numbers for ``limit`` and ``alpha``.

    Notes
    -----
    What is tried is a copy of the module that has nothing but numbers, texts and functions, and submodules of such; ops
    are made anew when one of these changes. A gate that reads more, such as a parameter, a buffer or the model's
    configuration, fails there, and none that has a hook is tried. A function that reads a variable of its Python module
    is taken at its present value.
    """
    try:
        bare, watched, key = _bare(module)
    except _NotRecognisable as error:
        logger.info("%s: %s", type(module).__name__, error)
        return None
    if key not in _recognised_before:
        if len(_recognised_before) >= _REMEMBERED:
            _recognised_before.clear()
        with ThreadPoolExecutor(1) as thread:  # where no mode and no hook for saved tensors holds that holds here
            trial = thread.submit(_recognise, bare, watched, _parameters(module, _layout(module)))
            _recognised_before[key] = trial.result()
    return copy.deepcopy(_recognised_before[key])


_recognised_before: dict[object, Op | None] = {}
_REMEMBERED = 256


class _NotRecognisable(Exception):  # noqa: N818
    """What keeps a gate from being tried."""


_SETTING = (bool, int, float, str, type(None))
_OF_MODULES = frozenset({*vars(nn.Module()), *vars(nn.Module)})


def _bare(module: nn.Module) -> tuple[nn.Module, Watched, tuple[object, ...]]:
    """Return a copy of a module with nothing in it that may change unnoticed, what to watch, and all of that as a key:
    two modules with the same key have the same gate.
    """
    bare, watched, key = _bare_part(module, ())
    gate = getattr(type(module), "_apply_gate", None)
    if "_apply_gate" in vars(module):
        raise _NotRecognisable("_apply_gate was set on the module itself")
    if gate is not None:
        _key(gate, module)
    return bare, tuple(watched), (gate, *key)


def _bare_part(module: nn.Module, path: Path) -> tuple[nn.Module, list[Any], list[object]]:
    kind = class_of(module)
    bare: nn.Module = object.__new__(kind)
    nn.Module.__init__(bare)
    functions: list[str] = []
    key: list[object] = [path, kind]
    of_class = {n: v for c in reversed(kind.__mro__[:-1]) if c is not nn.Module for n, v in vars(c).items()}
    settings = [n for n, v in of_class.items() if n[0] != "_" and isinstance(v, _SETTING) and n not in _OF_MODULES]
    for name, value in vars(module).items():
        if name in _OF_MODULES and name != "forward":
            continue
        if name[0] != "_" and isinstance(value, _SETTING):
            settings.append(name)
            vars(bare)[name] = value
        elif name[0] != "_" and isinstance(value, _FUNCTIONS) and name not in of_class:
            functions.append(name)
            vars(bare)[name] = MethodType(value.__func__, bare) if isinstance(value, MethodType) else value
        elif name in of_class and (path or name != "forward"):  # the experts' own forward is not their gate
            raise _NotRecognisable(f"{'.'.join((*path, name))} was set on the module itself")
    settings = list(dict.fromkeys(settings))
    key += [(name, type(value), value) for name in settings for value in [getattr(module, name)]]
    key += [(name, _key(getattr(module, name), module)) for name in functions]
    watched: list[Any] = [(path, tuple(settings), tuple(functions))]
    if path:
        _key(type(module).forward, module)
        key.append(type(module).forward)
        if _hooked(module):
            raise _NotRecognisable(f"{'.'.join(path)} has a hook")
    for name, part in module._modules.items():
        if part is None or any(True for _ in part.parameters()) or any(True for _ in part.buffers()):
            continue  # a gate that wants it fails without it
        bare_part, its_watched, its_key = _bare_part(part, (*path, name))
        bare._modules[name] = bare_part
        watched += its_watched
        key += its_key
    return bare, watched, key


_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)


def _key(function: Any, module: nn.Module) -> object:
    """Return what makes a function what it is, apart from what it is written in; raise if it holds something else."""
    if isinstance(function, functools.partial):
        values = (*function.args, *function.keywords.values())
        if all(isinstance(value, _SETTING) for value in values):
            return _key(function.func, module), function.args, tuple(function.keywords.items())
    elif isinstance(function, MethodType):
        if function.__self__ is module:
            return _key(function.__func__, module)
    else:
        cells = getattr(function, "__closure__", None) or ()
        if all(isinstance(cell.cell_contents, type) for cell in cells):  # what super() means
            return function
    raise _NotRecognisable(f"{function!r} holds values of its own")


def _recognise(bare: nn.Module, watched: Watched, parameters: dict[str, Tensor | None]) -> Op | None:
    down = parameters["down.weight"]
    assert down is not None
    layout, state = _layout(bare), _state(bare, watched)
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        rows = _rows_to_try(layout, down.shape[-1])
        try:
            answers = [
                _answer(functools.partial(_activation, bare.train(training)), rows.to(dtype), layout)
                for dtype in (torch.float64, torch.float32, torch.bfloat16)
                for training in (True, False)
            ]
        except Exception as error:  # noqa: BLE001  (somebody else's function: it may want a GPU, or more than numbers)
            logger.info("%s: tried on a CPU, its activation says %r", type(bare).__name__, error)
            return None
        if _state(bare, watched) != state:
            logger.info("%s: its activation changes what it reads", type(bare).__name__)
            return None
        of_module = (v for v in state if isinstance(v, int | float) and not isinstance(v, bool))
        numbers = dict.fromkeys(float(v) for v in of_module if v > 0)
        for op in _candidates(layout, list(numbers)):
            if _agree(op, rows[:1], answers[:1], layout) and _agree(op, rows, answers, layout):
                return op
    return None


def _rows_to_try(layout: Layout, intermediate: int) -> Tensor:
    """Return rows of the module's own width, three or more, with every pair of a gate and an up in them; fp64."""
    sizes = torch.cat([torch.logspace(-18, -1, 9), torch.linspace(0.4, 10, 25), torch.logspace(1.1, 18, 15)])
    sizes = sizes.bfloat16().double()  # the same numbers in every dtype
    values = torch.cat([-sizes, torch.tensor([0.0, torch.nan]).double(), sizes])
    pairs = torch.cartesian_prod(values, values) if layout.gated else values[:, None]
    pairs = pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))]
    height = max(3, -(-len(pairs) // intermediate))
    pairs = pairs[torch.arange(height * intermediate) % len(pairs)].view(height, intermediate, -1)
    return (pairs if layout.interleaved else pairs.mT).flatten(1)


class _Answer(NamedTuple):
    """What a function gives for rows: ``y``, and the derivative by each half of them; (1 or 2 or 3, *y.shape)."""

    values: Tensor
    tolerance: float
    with_derivatives: bool


def _answer(function: Any, rows: Tensor, layout: Layout) -> _Answer:
    x = rows.detach().requires_grad_()
    y = function(x)
    if y.shape != (len(rows), rows.shape[1] // (2 if layout.gated else 1)) or y.dtype is not rows.dtype:
        raise ValueError(f"{tuple(rows.shape)} in {rows.dtype} became {tuple(y.shape)} in {y.dtype}")
    (grad,) = torch.autograd.grad(y.sum(), x)
    values = torch.stack([y.detach(), *_halves(grad, layout)]).double()
    y = values[0][values[0].isfinite()]
    if rows.dtype is torch.bfloat16:
        return _Answer(values, 0.03, with_derivatives=False)  # too coarse to tell them
    # a function that computes in fp32, whatever it is given, comes no closer than that
    exact = rows.dtype is torch.float64 and not y.float().double().equal(y)
    return _Answer(values, 1e-12 if exact else 4e-6, with_derivatives=True)


def _halves(rows: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    if not layout.gated:
        return (rows,)
    return (rows[:, ::2], rows[:, 1::2]) if layout.interleaved else rows.chunk(2, dim=-1)


def _agree(op: Op, rows: Tensor, answers: list[_Answer], layout: Layout) -> bool:
    """Whether an op gives the same, to the precision of answers for the first so many rows and more."""
    got = _answer(op.compute, rows, layout).values
    inputs = torch.stack(_halves(rows, layout))
    scales, limit = [rows.square(), rows.abs()], None
    if isinstance(op, GLU):
        gate, up = op.clamped(*inputs)
        scales, limit = [gate.abs() * (up.abs() + op.offset), up.abs() + op.offset, gate.abs()], op.limit
    # elsewhere a derivative is either of two, or overflows
    smooth = ((inputs != 0) & (inputs.abs() != limit) & (inputs.abs() < 1e4)).all(0)
    for values, tolerance, with_derivatives in answers:
        want = values[:, : len(rows)]
        same = ((got - want).abs() <= tolerance * torch.stack(scales)) | (got.isnan() & want.isnan())
        same[1:] |= ~smooth
        if not (same if with_derivatives else same[:1]).all():
            return False
    return True


def _candidates(layout: Layout, numbers: list[float]) -> Iterator[Op]:
    if not layout.gated:
        yield SquaredReLU()
        return
    for limit in (None, *numbers):
        for offset in (0.0, 1.0):
            shape: dict[str, Any] = {"limit": limit, "offset": offset, "interleaved": layout.interleaved}
            yield from (SwiGLU(alpha=alpha, **shape) for alpha in dict.fromkeys((1.0, 1.702, *numbers)))
            yield from (GeGLU("tanh", **shape), GeGLU("none", **shape), ReGLU(**shape))
