"""Whole layers in bf16, under ``fp8_block`` and under ``fp8_block:wgrad=bf16``, in one timer.

For a few shapes, ``fp8_tensor`` takes turns with these: with current scaling, and with delayed scaling by the defaults
of Transformer Engine.

A layer is `fm.MoE`, from tokens to tokens with its router. Where the rows arrive dispatched (top 1), it is the routed
experts alone: ``Sequential(GroupedLinear, SwiGLU, Scale, GroupedLinear)``.

The cases differ in when weights are quantized:

- in every step: the cache of quantized weights is cleared before the call. The weight gradients are bf16 tensors.
- once per 8 micro-batches: the cache is cleared before the first of 8 calls of forward and backward, and the time is
  divided by 8. The weight gradients are accumulated in fp32 ``main_grad`` by the kernels, so the cache stays valid.

Weights in bf16 are not quantized, so there the cases differ in the weight gradients and the length of the call only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import fusedmoe as fm
from benchmarks.cases import geometric_mean, release
from benchmarks.problem import Problem
from benchmarks.recipes import DELAYED, under
from benchmarks.reference import glu
from benchmarks.shapes import Shape, splits
from fusedmoe.commands.bench.layer import OURS, Candidate, Leaves, Reference, Sizes, Work, our_layer, relative_error
from fusedmoe.commands.bench.measure import check
from fusedmoe.commands.timing import Timer, memory_of, times_of, why_not

if TYPE_CHECKING:
    from fusedmoe.fusion.report.data import Explanation

RECIPES = ("bf16", "fp8_block", "fp8_block:wgrad=bf16")
BY_EXPERT = ("fp8_tensor", DELAYED)  # with one scale per expert, for a few shapes
MICRO_BATCHES = 8
FORWARD, CACHED_FORWARD = "forward", "forward, weights quantized before"
STEP, ACCUMULATED = "forward + backward", f"forward + backward, weights quantized once per {MICRO_BATCHES}"
CASES = {FORWARD: 1, CACHED_FORWARD: 1, STEP: 3, ACCUMULATED: 3}  # FLOPs relative to one forward pass
RESULTS = ("y", "x", "weight1", "weight2")
WRONG, WRONG_IN_BF16 = 0.25, 0.03  # limits of the relative error to fp64


@dataclass(frozen=True)
class LayerRow:
    """A layer's figures under a recipe; ``note`` is the reason for missing ones."""

    case: str
    recipe: str
    note: str = ""
    ms: float | None = None  # of one forward pass, or one forward and backward pass
    quartiles_ms: tuple[float, float] | None = None
    tflops: float | None = None  # of the experts' products
    speedup: float | None = None  # time in bf16 divided by this one
    host_us: float | None = None
    kept_bytes: int | None = None  # GPU memory that the call keeps for backward, beyond the quantized weights
    peak_bytes: int | None = None


@dataclass
class Subject:
    """A layer with its operands.

    Attributes
    ----------
    layer
        The module, which has the cache of quantized weights.
    forward
        Returns y, recorded by autograd.
    explain
        Returns the plan of that call for sm_90.
    leaves
        The tensors that get gradients, by name: ``x``, ``router`` or ``probs``, ``weight1``, ``weight2``.
    dy
        The gradient of y.
    flops
        FLOPs of a forward pass of the experts' products.
    accumulates
        Whether the gradients of the weights are added to ``main_grad``.
    """

    layer: nn.Module
    forward: Callable[[], Tensor]
    explain: Callable[[], Explanation]
    leaves: dict[str, Tensor]
    dy: Tensor
    flops: float
    accumulates: bool = False

    @property
    def wanted(self) -> tuple[Tensor, ...]:
        """The leaves whose gradients autograd returns: all, or those without a ``main_grad``."""
        return tuple(t for name, t in self.leaves.items() if not (self.accumulates and name.startswith("weight")))


@dataclass
class Operands:
    """The operands of a shape, and the functions that make layers and exact results of them."""

    make: Callable[[], Subject]
    exact_errors: Callable[[Subject, str], dict[str, float]]  # relative to fp64 on a sample, by name
    main_grads: dict[str, Tensor] = field(default_factory=dict)

    def subject(self, accumulates: bool = False) -> Subject:
        """Return a new layer, which shares the memory of the weights with all others, and that of ``main_grad``."""
        subject = self.make()
        if accumulates:
            for linear in _linears(subject.layer):
                linear.accumulate_into_main_grad = True
            for name in ("weight1", "weight2"):
                weight = subject.leaves[name]
                if name not in self.main_grads:
                    self.main_grads[name] = torch.zeros_like(weight, dtype=torch.float32)
                weight.main_grad = self.main_grads[name]  # type: ignore[attr-defined]
            subject.accumulates = True
        return subject


def _linears(layer: nn.Module) -> list[fm.GroupedLinear]:
    return [module for module in layer.modules() if isinstance(module, fm.GroupedLinear)]


def why_left_out(shape: Shape) -> str:
    """Return why a shape is not measured; empty if it is."""
    return "" if shape.activation == "swiglu" else f"{shape.activation} with biases is not measured"


def measure(
    shape: Shape,
    timer: Timer,
    micro_batches: Timer,
    device: torch.device,
    recipes: Sequence[str] = RECIPES,
) -> dict[str, Any]:
    """Measure and print one shape; return its entry of the result file."""
    operands = of_layer(shape, device) if shape.top_k > 1 else of_rows(shape, device)
    notes: dict[str, str | None] = {}
    report: dict[str, dict[str, Any]] = {}
    subjects: dict[str, Subject] = {}
    for recipe in recipes:
        try:
            subject = operands.subject()
            found: dict[str, Any] = {}
            with under(recipe):
                report[recipe] = found
                if recipe == DELAYED:
                    _results(subject)  # the first step has no scales
                found["errors"] = operands.exact_errors(subject, recipe)
                found["unfused"] = _unfused(subject)
            found["weight_bytes"] = fm.weight_cache_bytes(subject.layer)
            worst = max(found["errors"].values())
            right = worst < (WRONG_IN_BF16 if recipe == "bf16" else WRONG)
            notes[recipe] = "" if right else f"wrong: relative error {worst:.2g}"
            if right:
                subjects[recipe] = subject
        except Exception as raised:  # noqa: BLE001 reported in the rows of the recipe
            notes[recipe] = why_not(raised)
            release(device)
    release(device)
    rows = []
    accumulating = {recipe: operands.subject(accumulates=True) for recipe in subjects}
    for case, factor in CASES.items():
        of_case = accumulating if case in (CACHED_FORWARD, ACCUMULATED) else subjects
        calls = {recipe: call_of(case, subject, recipe) for recipe, subject in of_case.items()}
        told = dict(notes)
        times = times_of(micro_batches if case == ACCUMULATED else timer, calls, told)
        memory = _memory(case, calls, told, device) if case in (FORWARD, STEP) else {}
        share = MICRO_BATCHES if case == ACCUMULATED else 1
        for recipe, note in told.items():
            figures: dict[str, Any] = {}
            if time := times.get(recipe):
                ms = time.median_ms / share
                figures = {
                    "ms": ms,
                    "quartiles_ms": tuple(quartile / share for quartile in time.quartiles_ms),
                    "tflops": factor * of_case[recipe].flops / ms / 1e9,
                    "speedup": times["bf16"].median_ms / time.median_ms if "bf16" in times else None,
                    "host_us": time.host_idle_us / share,
                }
            if recipe in memory:
                kept, peak = memory[recipe]
                figures |= {"peak_bytes": peak, "kept_bytes": kept if case == FORWARD else None}
            rows.append(LayerRow(case, recipe, note or "", **figures))
        release(device)
    entry = asdict(shape) | {"layer": "MoE" if shape.top_k > 1 else "experts", "rows": [asdict(row) for row in rows]}
    entry |= {"recipes": report}
    print("\n".join(lines(entry)), flush=True)
    return entry


def call_of(case: str, subject: Subject, recipe: str) -> Callable[[], Any]:
    """Return the timed call of a case."""

    def forward() -> Tensor:
        with under(recipe):
            return subject.forward()

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), subject.wanted, subject.dy)

    def quantizing(call: Callable[[], Any], times: int = 1) -> Callable[[], Any]:
        def calls() -> Any:
            fm.clear_weight_cache(subject.layer)
            for _ in range(times - 1):
                call()
            return call()

        return calls

    if case == CACHED_FORWARD:
        return forward
    if case == ACCUMULATED:
        return quantizing(step, MICRO_BATCHES)
    return quantizing(forward if case == FORWARD else step)


def lines(entry: Mapping[str, Any]) -> list[str]:
    """Return the table of a shape."""
    text = [f"  {'case':52}{'recipe':24}{'ms':>9}{'TFLOP/s':>9}{'speedup':>9}{'kept GiB':>10}{'peak GiB':>10}"]
    for row in entry["rows"]:
        figures = ""
        if row["ms"] is not None:
            speedup = "" if row["speedup"] is None else f"{row['speedup']:.2f}"
            memory = "".join(_gib(row[name]) for name in ("kept_bytes", "peak_bytes"))
            figures = f"{row['ms']:9.3f}{row['tflops']:9.0f}{speedup:>9}{memory}"
        text.append(f"  {row['case']:52}{row['recipe']:24}{figures}  {row['note']}".rstrip())
    for recipe, found in entry["recipes"].items():
        if "errors" in found:
            each = ", ".join(f"{name} {error:.1e}" for name, error in found["errors"].items())
            text.append(f"  {recipe}: error to fp64: {each}")
        if found.get("unfused"):
            text.append(f"  {recipe}: not fused: {', '.join(found['unfused'])}")
    return text


def _gib(amount: int | None) -> str:
    return f"{'' if amount is None else format(amount / 2**30, '.2f'):>10}"


def speedups(entries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the geometric mean over the shapes of the time in bf16 divided by that of a recipe, by case."""
    found: dict[str, dict[str, float]] = {}
    for case in CASES:
        for recipe in RECIPES[1:]:
            values = [
                row["speedup"] for entry in entries for row in entry["rows"]
                if (row["case"], row["recipe"]) == (case, recipe) and row["speedup"]
            ]  # fmt: skip
            if values:
                found.setdefault(case, {})[recipe] = geometric_mean(values)
    return found


def _results(subject: Subject) -> tuple[Tensor, ...]:
    """Return y and all gradients."""
    y = subject.forward()
    return y.detach(), *torch.autograd.grad(y, subject.wanted, subject.dy)


def _unfused(subject: Subject) -> list[str]:
    """Return the steps of the plan that no rule fuses."""
    return [" + ".join(step.ops) for step in subject.explain().steps if step.rule is None]


def _memory(
    case: str, calls: Mapping[str, Callable[[], Any]], notes: dict[str, str | None], device: torch.device
) -> dict[str, tuple[int, int]]:
    """Return kept and peak bytes by recipe, of calls that have run before."""
    found = {}
    for recipe, call in calls.items():
        if device.type == "cuda":
            try:
                found[recipe] = memory_of(call, device)
            except Exception as raised:  # noqa: BLE001 reported in the recipe's row
                notes[recipe] = f"memory of {case} not measured: {why_not(raised)}"
    return found


# ---- whole layers --------------------------------------------------------------------------------------------------


def of_layer(shape: Shape, device: torch.device) -> Operands:
    """Return the operands of an `fm.MoE`, as the section ``layer`` has them."""
    sizes = Sizes(shape.hidden, shape.intermediate, shape.experts, shape.top_k, shape.tokens)
    work = Work(sizes, torch.bfloat16, device)
    exact = Reference(work, work.index)

    def make() -> Subject:
        layer, x = our_layer(work), work.x.detach().requires_grad_()
        leaves = Leaves(x, *layer.parameters())
        explain = functools.partial(layer.explain, x, arch=90)
        return Subject(layer, lambda: layer(x), explain, leaves._asdict(), work.dy, sizes.forward_flops)

    def errors(subject: Subject, recipe: str) -> dict[str, float]:
        x = subject.leaves["x"]

        def chosen() -> Tensor:
            with torch.no_grad():
                _, stats = subject.layer(x, return_stats=True)
            return stats.logits.topk(sizes.top_k, dim=-1).indices  # type: ignore[no-any-return]

        candidate = Candidate(subject.forward, Leaves(**subject.leaves), chosen, note=f"{OURS}, {recipe}")
        return check(work, candidate, exact)[0]

    return Operands(make, errors)


# ---- experts on dispatched rows ------------------------------------------------------------------------------------


def of_rows(shape: Shape, device: torch.device) -> Operands:
    """Return the operands of the routed experts on dispatched rows, with a scale per row."""
    problem = Problem(shape, splits(shape.rows, shape.experts, "uniform"), device)
    scale = problem.row_scale

    def make() -> Subject:
        first = fm.GroupedLinear(
            shape.experts, shape.hidden, 2 * shape.intermediate, device="meta", dtype=problem.dtype
        )
        second = fm.GroupedLinear(shape.experts, shape.intermediate, shape.hidden, device="meta", dtype=problem.dtype)
        first.weight, second.weight = nn.Parameter(problem.weight1), nn.Parameter(problem.weight2)
        chain = fm.Sequential(first, fm.SwiGLU(), fm.Scale("probs"), second)
        leaves = {
            "x": problem.x.detach().requires_grad_(), "probs": scale.detach().requires_grad_(),
            "weight1": first.weight, "weight2": second.weight,
        }  # fmt: skip

        inputs = {"splits": problem.splits, "probs": leaves["probs"]}
        forward = functools.partial(chain, leaves["x"], **inputs)
        explain = functools.partial(chain.explain, leaves["x"], arch=90, **inputs)
        return Subject(chain, forward, explain, leaves, problem.grad_y, shape.forward_flops())

    exact = {expert: _exact(problem, expert) for expert in problem.sample()}

    def errors(subject: Subject, recipe: str) -> dict[str, float]:
        got = dict(zip(("y", *subject.leaves), _results(subject), strict=True))
        return {
            name: max(relative_error(_part(problem, name, t, expert), exact[expert][name]) for expert in exact)
            for name, t in got.items()
        }

    return Operands(make, errors)


def _part(problem: Problem, name: str, t: Tensor, expert: int) -> Tensor:
    return t[expert] if name.startswith("weight") else t[problem.rows_of(expert)]


def _exact(problem: Problem, expert: int) -> dict[str, Tensor]:
    """Return one expert's results in fp64."""
    rows = problem.rows_of(expert)
    named = {
        "x": problem.x[rows], "probs": problem.row_scale[rows], "weight1": problem.weight1[expert],
        "weight2": problem.weight2[expert],
    }  # fmt: skip
    leaves = {name: t.double().requires_grad_() for name, t in named.items()}
    with torch.enable_grad():
        activated = glu(leaves["x"] @ leaves["weight1"].T, problem.activation) * leaves["probs"][:, None]
        y = activated @ leaves["weight2"].T
    grads = torch.autograd.grad(y, list(leaves.values()), problem.grad_y[rows].double())
    return {"y": y.detach()} | dict(zip(leaves, grads, strict=True))
