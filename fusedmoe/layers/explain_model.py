"""`explain`: the plans of a whole model, made without calling the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedmoe.base.checks import MODULE, POSITIVE_INTEGER
from fusedmoe.base.errors import InputError
from fusedmoe.base.target import planned_for
from fusedmoe.fusion.language.rule import FusionError
from fusedmoe.fusion.report.data import Explanation, PlannedStep, format_bytes, hints, in_columns, raise_if_missed
from fusedmoe.layers.moe import MoE
from fusedmoe.layers.sequential import Sequential
from fusedmoe.ops import GroupedLinear, Linear, Op, Router


@dataclass(frozen=True)
class ExplainedModules:
    """Modules of a model that have the same plans."""

    names: tuple[str, ...]  # their names in the model
    kind: str  # their class
    explanation: Explanation | None  # the plans of the first module; None if planning failed
    note: str = ""  # the reason for a failure
    # The class of the model's own router, which chooses the experts and runs unchanged. Empty if a `Router` is part of
    # the plans, and if no router was found next to the module.
    router: str = ""
    why_own_router: str = ""  # the reason for that, from an integration; empty if none is known

    @property
    def name(self) -> str:
        """The names as one text: ``layers.{0-47}.mlp``."""
        return _short(self.names)


@dataclass(frozen=True)
class ModelExplanation:
    """The plans of the experts and MLPs of a model. ``str()`` is a table with a line per group of modules."""

    #: Modules with the same plans, in the order of the model. ``print(result.groups[0].explanation)`` shows each step.
    groups: tuple[ExplainedModules, ...]
    #: The number of tokens, or rows, of the planned call. All bytes are for this number.
    tokens: int = 0

    @property
    def plans(self) -> tuple[Any, ...]:
        """The plans of all groups."""
        return tuple(plan for g in self.groups if g.explanation for plan in g.explanation.plans)

    @property
    def missed(self) -> tuple[tuple[str, str], ...]:
        """The places that are not fused or have no plan, each with its reason: see `PlanData.missed`."""
        found = []
        for group in self.groups:
            if group.explanation is None:
                found.append((group.name, f"not planned: {group.note}"))
            else:
                found += [(f"{group.name}: {label}", str(miss)) for label, miss in group.explanation.missed]
        return tuple(found)

    def raise_if_missed(self) -> None:
        """Raise `FusionError` if an op that has a fused kernel is not fused: see `missed`.

        An op without a fused kernel, such as a product of quantized operands, does not raise.

        Raises `FusionError`: also if no module runs on `fusedmoe`, or if the architecture has no kernels.
        """
        if not self.groups:
            raise FusionError("strict: no module of this model runs on fusedmoe")
        raise_if_missed(self.plans, self.missed)

    def __str__(self) -> str:
        explained = [(group.name, group.explanation) for group in self.groups if group.explanation is not None]
        notes = [note for name, explanation in explained for note in _why_unfused(name, explanation)]
        routers = [
            f"{group.name}: the model's own router, {group.router}, chooses the experts and runs unchanged"
            + (f": {group.why_own_router}" if group.why_own_router else "")
            for group in self.groups
            if group.router
        ]
        return "\n".join([self.table(), *routers, *notes, *hints(self.plans)])

    def table(self) -> str:
        """Return the table without the reasons: a line per group."""
        if not self.groups:
            return "no module of this model runs on fusedmoe"
        rows: list[tuple[str, ...]] = [
            ("modules", "class", "forward", "backward", f"kept for {self.tokens:,} tokens", "for")
        ]
        for group in self.groups:
            if group.explanation is None:
                rows.append((group.name, group.kind, "-", "-", "-", group.note))
                continue
            steps, plans, modules = group.explanation.steps, group.explanation.plans, len(group.explanation.modules)
            directions = ([s for s in steps if s.direction == d] for d in ("forward", "backward"))
            forward, backward = (_counted(of_direction, modules) for of_direction in directions)
            kept = format_bytes(sum(plan.kept_bytes for plan in plans))
            for_ = ", ".join(dict.fromkeys(p.planned_for for p in plans))
            rows.append((group.name, group.kind, forward, backward, kept, for_))
        return "\n".join(in_columns(rows))


def explain(
    model: nn.Module, tokens: int = 4096, arch: int | str | None = None, dtype: torch.dtype | None = None
) -> ModelExplanation:
    """Return the plans of every part of a model that runs on `fusedmoe`. ``print`` shows them as a table.

    These parts are planned:

    - each `MoE` and `Sequential`;
    - experts of transformers that run on `fusedmoe`;
    - experts of torchtitan and Megatron-Core that `fusedmoe.integrations` built;
    - every other module whose class has a method ``explain_rows(rows: int) -> Explanation``.

    The model is not called. A plan is for evenly routed tokens, on the device and in the dtype of the part's weights.
    The current settings apply (``fm.recipe``, ``torch.autocast``, ``torch.no_grad``).

    Parameters
    ----------
    model
        The model.
    tokens
        The number of tokens of a call. Parts that take sorted rows are planned for this number of rows: a `Sequential`
        without `Dispatch`, and experts of torchtitan and of Megatron-Core.
    arch
        Plan for an NVIDIA GPU of this architecture, 90 or "sm_90", instead of the device of the weights. The machine
        needs no GPU, and the model may be on the meta device.
    dtype
        With ``arch``: plan for rows and parameters in this dtype, as under `torch.autocast`. The table says so.
    """
    MODULE("explain: model", model)
    tokens = POSITIVE_INTEGER("explain: tokens", tokens)
    groups: dict[tuple[str, ...], ExplainedModules] = {}
    with planned_for(arch, dtype):
        for name, module, outcome in _parts(model, tokens):
            router = _router_of(model, name, module, outcome.explanation)
            key = type(module).__name__, str(outcome.explanation or outcome.note), *router
            known = groups.get(key)
            names = (*known.names, name) if known else (name,)
            groups[key] = ExplainedModules(names, key[0], *outcome, *router)
    return ModelExplanation(tuple(groups.values()), tokens)


class _Outcome(NamedTuple):
    """The plans of a module, or the reason why there are none."""

    explanation: Explanation | None
    note: str = ""


def _parts(model: nn.Module, tokens: int) -> Iterator[tuple[str, nn.Module, _Outcome]]:
    done: list[str] = []  # prefixes of the names inside modules that were explained
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(prefix) for prefix in done):
            continue
        try:
            _name(module, name)
            found = _explained(module, tokens)
        except Exception as error:  # noqa: BLE001  (a module between two chains is called and may raise anything)
            text = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
            found = _Outcome(None, next(iter(text.splitlines()), ""))
        if found is not None:
            prefix = f"{name}." if name else ""
            # the shared expert of an MoE has its own line
            own = ("router.", "experts.") if isinstance(module, MoE) else ("",)
            done += [prefix + part for part in own]
            yield name, module, found


def _router_of(model: nn.Module, name: str, module: nn.Module, explanation: Explanation | None) -> tuple[str, str]:
    """Return `ExplainedModules.router`, for an `MoE` or a router next to experts, and why it is the model's."""
    ops = {op.rpartition(".")[2] for step in explanation.steps for op in step.ops} if explanation is not None else {}
    if "GroupedLinear" not in ops or "Router" in ops:
        return "", ""
    owner = module if isinstance(module, MoE) else model.get_submodule(name.rpartition(".")[0])
    router = next((owner._modules[child] for child in ("router", "gate") if owner._modules.get(child)), None)
    if router is None or isinstance(router, Router):
        return "", ""
    reasons = (reason(router) for reason in _reasons_for_routers)
    return type(router).__name__, next(filter(None, reasons), "")


def _name(module: nn.Module, name: str) -> None:
    """Set the name of a `Sequential` or an `MoE` in the model, for log lines."""
    if isinstance(module, (MoE, Sequential)):
        module._is_called(name)


def _explained(module: nn.Module, tokens: int) -> _Outcome | None:
    """Return a module's plans, or the reason; None for a module that does not run on `fusedmoe`."""
    if isinstance(module, MoE):
        module.check_biases()
        router, layers = module.router, [m for m in module.experts.modules() if isinstance(m, GroupedLinear)]
        if layers and module._is_one_chain():
            return _Outcome(module.explain(_rows(tokens, module.hidden, layers[0].weight)))
        trained = any(p.requires_grad for p in router.parameters())
        return _explained_sequential(module.experts, tokens, getattr(router, "top_k", 2), trained=trained)
    if isinstance(module, Sequential):
        return _explained_sequential(module, tokens)
    if callable(explain_rows := getattr(type(module), "explain_rows", None)):
        explanation = explain_rows(module, tokens)
        if not isinstance(explanation, Explanation):
            raise InputError(f"explain_rows: expected an Explanation, got {type(explanation).__name__}")
        return _Outcome(explanation)
    explained = next(filter(None, (explainer(module, tokens) for explainer in _explainers)), None)
    return None if explained is None else _Outcome(explained)


Explainer = Callable[[nn.Module, int], Explanation | None]
_explainers: list[Explainer] = []


def register_explainer(explainer: Explainer) -> Explainer:
    """Register a function of a module and a number of tokens that returns the plans, or None for other modules.

    An integration registers one when it is imported, if its modules cannot have a method ``explain_rows``.
    """
    _explainers.append(explainer)
    return explainer


ReasonForRouter = Callable[[nn.Module], str | None]
_reasons_for_routers: list[ReasonForRouter] = []


def register_reason_for_router(reason: ReasonForRouter) -> ReasonForRouter:
    """Register a function of a model's own router that returns why it runs unchanged, or None for other modules."""
    _reasons_for_routers.append(reason)
    return reason


def _explained_sequential(module: Sequential, tokens: int, top_k: int = 2, *, trained: bool = False) -> _Outcome | None:
    """Return the plans for ``top_k`` experts per token. ``trained``: the routing weights get a gradient."""
    ops = [m for m in module.modules() if isinstance(m, Op)]
    layers = [op for op in ops if isinstance(op, GroupedLinear | Linear)]
    if not ops:
        return None
    if not layers:
        return _Outcome(None, "no linear layer determines the width of its rows: call its own explain()")
    weight: Tensor | None = layers[0].weight
    if weight is None:
        return _Outcome(None, "its parameters are arguments of each call: call its own explain_with()")
    groups = [op.num_groups for op in ops if isinstance(op, GroupedLinear)]
    experts = groups[0] if groups else 1
    slots = torch.arange(tokens * min(top_k, experts), device=weight.device).view(tokens, -1) % experts
    rows = _rows(tokens, layers[0].in_features, weight)
    scores = torch.ones(slots.shape, dtype=torch.promote_types(rows.dtype, torch.float32), device=weight.device)
    known: dict[str, Tensor] = {
        "splits": even_splits(tokens, experts, weight.device),
        "probs": torch.ones(tokens, dtype=torch.float32, device=weight.device),
        "expert_index": slots,
        "expert_weight": scores.requires_grad_(trained and torch.is_grad_enabled()),
    }
    if unknown := [name for name in module.runtime_inputs if name not in known]:
        return _Outcome(None, f"takes {', '.join(unknown)}: call its own explain()")
    inputs = {name: known[name] for name in module.runtime_inputs}
    return _Outcome(module.explain(rows, **inputs))


def even_splits(rows: int, experts: int, device: torch.device) -> Tensor:
    """Return the number of rows of each expert when rows are routed evenly."""
    splits = torch.full((experts,), rows // experts, device=device)
    splits[: rows % experts] += 1
    return splits


def _rows(tokens: int, features: int, weight: Tensor) -> Tensor:
    kind = weight.device.type
    own = weight.dtype if weight.dtype.itemsize > 1 else torch.bfloat16  # of codes in FP8, any rows can be planned
    dtype = torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else own
    return torch.zeros(tokens, features, dtype=dtype, device=weight.device, requires_grad=torch.is_grad_enabled())


def _counted(steps: Sequence[PlannedStep], modules: int) -> str:
    """Return the number of fused steps and of all steps; each module between chains is one more step."""
    fused = sum(step.rule is not None for step in steps)
    return f"{fused} of {len(steps) + modules} fused" if steps else "-"


def _why_unfused(names: str, explanation: Explanation) -> list[str]:
    lines = []
    for title, plan in explanation.parts:
        text = title if plan is None else str(plan)
        _, found, reasons = text.partition("unfused, because:\n")
        if plan is None:
            lines.append(f"  {title}")
        elif found:
            lines += reasons.splitlines()
    return [f"{names}, unfused:", *lines] if lines else []


def _short(names: Sequence[str]) -> str:
    """``layers.0.mlp, layers.1.mlp, layers.3.mlp -> layers.{0-1,3}.mlp``."""
    patterns: dict[str, list[int]] = {}
    for name in names:
        numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", f".{name}")
        if not numbers:
            patterns[name] = []
            continue
        first = int(numbers[0])
        patterns.setdefault(re.sub(rf"(?<![^.]){first}(?![^.])", "{}", name, count=1), []).append(first)
    texts = [pattern.replace("{}", _ranges(numbers)) for pattern, numbers in patterns.items()]
    return ", ".join(text or "(the model)" for text in texts)


def _ranges(numbers: Sequence[int]) -> str:
    if len(numbers) < 2:
        return "".join(map(str, numbers))
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return "{" + ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs) + "}"
