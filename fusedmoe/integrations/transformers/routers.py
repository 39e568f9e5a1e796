"""Routers of transformers: the ops that `patch_routers` of `fusedmoe.integrations.transformers` runs.

A patched router is still called as a module of the model, so that its hooks run, and with them those that record its
logits. It reads its parameters at each call. If the experts that follow can run in the same chain, the call of the
router runs them too: the block calls the router with a `_Call`, which hands their result over.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fusedmoe.base.autocast import autocast_dtype
from fusedmoe.base.errors import InputError
from fusedmoe.base.log import say_once
from fusedmoe.call import modes
from fusedmoe.fusion.report.data import Explanation
from fusedmoe.integrations.transformers import expert_modules
from fusedmoe.integrations.transformers.expert_modules import ROUTER, experts_of, number_of_experts
from fusedmoe.integrations.transformers.router_kinds import ARGUMENT, Recognised, parameters_of, recognise, settings_of
from fusedmoe.layers.sequential import Sequential, explain_call
from fusedmoe.ops.op import made_untraced

if TYPE_CHECKING:
    from fusedmoe.integrations.transformers.expert_modules import Experts

logger = logging.getLogger(__name__)

_PROVIDED = "router_logits", "expert_weight", "expert_index"  # in the order of transformers' routers
_DTYPES = torch.bfloat16, torch.float16, torch.float32  # of tokens and weights


class Routed(NamedTuple):
    """A patched router, in the ``__dict__`` of the router and of its experts."""

    found: Recognised
    alone: Sequential  # the router without experts
    router: nn.Module
    block: nn.Module  # has the router and the experts
    runs_here: Callable[[nn.Module], bool]  # whether a module of experts runs on fusedmoe


class _Call:
    """A call of a block, in which the call of the router may run the experts too."""

    def __init__(self, experts: nn.Module) -> None:
        self.experts = experts
        self.rows: Tensor | None = None  # that the block calls its router with
        self.y: Tensor | None = None
        self.index: Tensor | None = None
        self.weight: Tensor | None = None
        self.versions: tuple[int, ...] = ()  # of index and weight, which a hook may change in place


class _Block:
    """A block during a call: it runs the forward of the block's class, with another router and other experts."""

    def __init__(self, block: Any, name: str) -> None:
        self._block, self._name = block, name
        self._router, self._call = getattr(block, name), _Call(block.experts)

    def __getattr__(self, name: str) -> Any:
        # as an attribute, the bound method would keep this object, and the tensors of the call, until Python looks for
        # cycles: gigabytes in training
        return self._route if name == self._name else getattr(self._block, name)

    def _route(self, hidden_states: Tensor, *arguments: Tensor) -> Any:
        if ROUTER not in self._router.__dict__:  # wrapped or replaced since
            return self._router(hidden_states, *arguments)
        self._call.rows = hidden_states
        return self._router(hidden_states, *arguments, call=self._call)

    def experts(self, hidden_states: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        call = self._call
        same = call.y is not None and index is call.index and weight is call.weight
        if same and _versions(index, weight) == call.versions:
            return call.y  # type: ignore[return-value]
        return call.experts(hidden_states, index, weight)  # type: ignore[no-any-return]


def patch(model: nn.Module, fp32_logits: bool, runs_here: Callable[[nn.Module], bool]) -> int:
    """Patch the routers of a model; return their number. See `fusedmoe.integrations.transformers.patch_routers`."""
    candidates = [(n, *found) for n, m in model.named_modules() if (found := _router_in(m)) is not None]
    if not candidates:
        expected = "a model of transformers with routers next to experts"
        raise InputError(f"patch_routers: expected {expected}, got {type(model).__name__}")
    for place, block, name in candidates:
        for module in (block, getattr(block, name)):
            replaced = vars(module).get("forward")
            if replaced is not None and not _is_patched(module):
                raise InputError(f"patch_routers: the forward of {place!r} was already replaced, by {replaced!r}")
    return sum(_patch(block, name, fp32_logits, runs_here) for _, block, name in candidates)


def unpatch(model: nn.Module) -> int:
    """Undo `patch`; return the number of routers."""
    undone = 0
    for module in list(model.modules()):
        if _is_patched(module):
            undone += module.forward.func is _router_forward  # type: ignore[attr-defined]
            del module.forward
        if module.__dict__.pop(ROUTER, None) is not None:
            module.__dict__.pop(expert_modules.OPS, None)
    return undone


def why_own(router: nn.Module) -> str:
    """Return why a router of transformers runs unchanged."""
    held: Routed | None = vars(router).get(ROUTER)
    if held is not None:
        return f"it is patched, but {_why_not(router, held, router.weight)}"  # type: ignore[arg-type]
    found = recognise(router)
    if isinstance(found, str):
        return found
    if found.fp32:
        return "call patch_routers(model) to run it with the kernels of fm.Router"
    return _not_in_fp32(router)


def _not_in_fp32(router: nn.Module) -> str:
    dtype = str(getattr(getattr(router, "weight", None), "dtype", torch.float32)).removeprefix("torch.")
    return (
        f"it computes its logits in the dtype of the model, {dtype}, and fm.Router in fp32, which changes the choice "
        f"for some tokens; patch_routers(model, fp32_logits=True) allows that"
    )


def explained(module: nn.Module, experts: Experts, x: Tensor, arch: Any, **inputs: Tensor) -> Explanation | None:
    """Return the plans of a patched router and its experts; None if the model's own router runs."""
    held: Routed | None = module.__dict__.get(ROUTER)
    if held is None or _why_not(held.router, held, x):
        return None
    correction = [x.new_zeros(held.found.op.num_experts)] if held.found.known.correction == ARGUMENT else []
    routers = _named(held.router, held, tuple(correction))
    together = _with_experts(module, held, x) if _is_patched(held.block) and held.block.experts is module else None
    if together is not None:
        chain, parameters = together
        return explain_call(chain, routers | parameters, x, {}, arch, _PROVIDED)
    parameters = expert_modules.parameters_of(module, experts.layout)
    alone = explain_call(held.alone, routers, x, {}, arch, _PROVIDED)
    return Explanation(alone.parts + experts.chain.explain_with(parameters, x, arch=arch, **inputs).parts)


# ---- the patch ----------------------------------------------------------------------------------------------------


def _router_in(block: nn.Module) -> tuple[Any, str] | None:
    """Return a block and the name of its router, if it has experts with transformers' decorator and a router."""
    experts = block._modules.get("experts")
    if experts is None or not hasattr(experts, "is_transposed"):
        return None
    return next(((block, name) for name in ("gate", "router") if block._modules.get(name) is not None), None)


def _patch(block: Any, name: str, fp32_logits: bool, runs_here: Callable[[nn.Module], bool]) -> bool:
    router = getattr(block, name)
    found = recognise(router)
    # a repeated call keeps the routers that an earlier one patched with fp32_logits
    if isinstance(found, str) or not (found.fp32 or fp32_logits or _is_patched(router)):
        reason = found if isinstance(found, str) else _not_in_fp32(router)
        say_once(logger, logging.WARNING, "patch_routers leaves %s as it is: %s", type(router).__name__, reason)
        return False
    held = Routed(found, Sequential(OrderedDict(router=found.op)).without_parameters(), router, block, runs_here)
    for module in (router, block.experts):
        module.__dict__[ROUTER] = held
    block.experts.__dict__.pop(expert_modules.OPS, None)
    # partials, since copies and pickles of them refer to the copied modules
    router.forward = functools.partial(_router_forward, router)
    if made_untraced(_passes_rows_on, block, name, found.op.hidden):
        block.forward = functools.partial(_block_forward, block, name)
    return True


@torch.no_grad()
def _passes_rows_on(block: Any, name: str, hidden: int) -> bool:
    """Whether a block calls its experts with the rows that its router got, and with the router's results."""
    probe = _Probe(block, name)
    attributes = set(vars(probe))
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):  # a block may draw numbers too
            type(block).forward(probe, torch.randn(2, 3, hidden, dtype=torch.float32, device="cpu"))
    except Exception:  # noqa: BLE001  (foreign code)
        return False
    return probe.passed_on and set(vars(probe)) == attributes  # an attribute that it sets would be lost


class _Probe:
    """A block whose modules are functions that change the rows, except its router and its experts."""

    def __init__(self, block: nn.Module, name: str) -> None:
        self._block, self.passed_on = block, False
        self._rows = self._index = self._weight = torch.empty(0, dtype=torch.float32, device="cpu")
        setattr(self, name, self._route)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._block, name)
        return (lambda x, *_, **__: 2 * x + 1) if isinstance(value, nn.Module) else value

    def _route(self, hidden_states: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._rows = hidden_states.reshape(-1, hidden_states.shape[-1]).clone()
        few = self._rows[:, :2].clone()
        self._index, self._weight = few.long(), few
        return self._rows, self._weight, self._index

    def experts(self, rows: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        same = rows.shape == self._rows.shape and torch.equal(rows, self._rows)
        self.passed_on = same and index is self._index and weight is self._weight
        return rows


# ---- the call -----------------------------------------------------------------------------------------------------


def _block_forward(block: Any, name: str, *arguments: Any, **named: Any) -> Any:
    return type(block).forward(_Block(block, name), *arguments, **named)


def _router_forward(router: Any, hidden_states: Tensor, *arguments: Tensor, call: _Call | None = None) -> Any:
    """Return the logits, the weights of the chosen experts, and the chosen experts; with ``call`` run the experts."""
    held: Routed = router.__dict__[ROUTER]
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    if _why_not(router, held, x):
        return type(router).forward(router, hidden_states, *arguments)
    parameters = _named(router, held, arguments)
    routed = None
    # a hook may have replaced the rows of the router, or may change its results, also through `.data`
    if call is not None and hidden_states is call.rows and not _has_hooks_of_others(router):
        routed = _with_experts(call.experts, held, x)
    if call is None or routed is None:
        _, values = modes.run(held.alone, x, {}, parameters, _PROVIDED)
    else:
        chain, of_experts = routed
        call.y, values = modes.run(chain, x, {}, parameters | of_experts, _PROVIDED)
        call.weight, call.index = values["expert_weight"], values["expert_index"]
        call.versions = _versions(call.index, call.weight)
    return tuple([values[name] for name in _PROVIDED])


def _has_versions() -> bool:
    """Whether tensors count their changes in place."""
    return not (torch.compiler.is_compiling() or torch.is_inference_mode_enabled())


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    return tuple([t._version for t in tensors]) if _has_versions() else ()


def _has_hooks_of_others(router: Any) -> bool:
    """Whether a router has forward hooks other than those of transformers, which record outputs."""
    hooks = router._forward_hooks.values()
    return any(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)


def _named(router: nn.Module, held: Routed, arguments: tuple[Any, ...]) -> dict[str, Tensor | None]:
    own = parameters_of(router, held.found.known, arguments)
    return {f"router.{name}": parameter for name, parameter in own.items()}


def _why_not(router: Any, held: Routed, x: Tensor) -> str:
    """Return why a patched router runs as before for these tokens; "" if the op computes the same."""
    weight = router.weight
    if type(weight) is not nn.Parameter and type(weight) is not Tensor:
        return "its weight is sharded or a tensor subclass; under FSDP, a call gathers it and runs fm.Router"
    if autocast_dtype(x.device) is not None:
        return "autocast is on"
    if x.dtype not in _DTYPES or weight.dtype not in _DTYPES:
        return "tokens or weight are not in bf16, fp16 or fp32"
    if weight.shape != (held.found.op.num_experts, held.found.op.hidden):
        return "its weight has another shape than before; call patch_routers again"
    if settings_of(router, held.found.names) != held.found.settings:
        return "its settings have changed since; call patch_routers again"
    return ""


def _with_experts(module: Any, held: Routed, x: Tensor) -> tuple[Sequential, dict[str, Tensor | None]] | None:
    """Return the chain of router and experts, with parameters; None if a call of the experts would do more."""
    if module.__dict__.get(ROUTER) is not held or not held.runs_here(module):
        return None
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    if hooks or _has_any_global_hook() or "forward" in module.__dict__:
        return None
    if number_of_experts(module) != held.found.op.num_experts:
        return None
    experts = experts_of(module)
    if experts.routed is None or (module.down_proj.dtype is not x.dtype and not experts.layout.fp8):
        return None
    return experts.routed, expert_modules.parameters_of(module, experts.layout)


def _is_patched(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, functools.partial) and forward.func in (_router_forward, _block_forward)
