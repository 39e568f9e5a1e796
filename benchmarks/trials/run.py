"""Measurement of each product of a layer's training step with each tile configuration, schedule and variant.

The time of a call is measured in two ways. ``ms`` is the median of single calls with a cold L2. ``back_to_back_ms`` is
the mean of calls that follow each other, so the GPU runs at its power limit, as in a training step. The results of
every call must equal those of the shipped kernel with the same tiles under the static schedule, bit for bit.

Axes: T tokens, K chosen experts per token, R = T K rows sorted by expert, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks import layer, shapes
from benchmarks.shapes import Shape
from benchmarks.trials import TRIALS
from fusedmoe.bench.timing import Timer
from fusedmoe.kernels import compiler
from fusedmoe.kernels.kernel import Kernel
from fusedmoe.kernels.options import KernelOptions, Schedule
from fusedmoe.kernels.sm90 import choice, functions
from fusedmoe.kernels.sm90.choice import Problem
from fusedmoe.kernels.sm90.config import TileConfig

FEW_ROWS = (  # layers with 512 rows per expert
    Shape("qwen3-30b-a3b, 8192 tokens", 8192, 2048, 768, 128, 8),
    Shape("glm-4.5-air, 8192 tokens", 8192, 4096, 1408, 128, 8),
)
SCHEDULES: tuple[Schedule, ...] = ("static", "dynamic")
IN_A_ROW = 10  # calls of a measurement back to back
ROUNDS = 3  # such measurements per candidate; the median counts

Call = Callable[[], "tuple[Tensor, ...]"]


class Product(NamedTuple):
    """A product of the layer: with the options of a `Sequential`, it returns the call that computes the result."""

    title: str
    bind: Callable[[KernelOptions], Call]


@dataclass(frozen=True)
class Candidate:
    """One way to compute a product."""

    config: TileConfig
    schedule: Schedule
    trial: str | None  # a key of `TRIALS`; None: the shipped kernel

    @property
    def name(self) -> str:
        return ", ".join(part for part in (self.config.name, self.schedule, self.trial) if part)


def measured_shapes() -> tuple[Shape, ...]:
    """Return SonicMoE's shapes, and two with fewer rows per expert."""
    known = shapes.load()
    return (*(known[name] for name in layer.SHAPES), *FEW_ROWS)


def products(shape: Shape, device: torch.device, load: Tensor | None = None) -> tuple[Product, ...]:
    """Return the products of a training step of the layer, on random tensors.

    ``load`` (E,) are the rows per expert, at most R in all. Without it, routing is random.
    """
    bf16, hidden, inner = torch.bfloat16, shape.hidden, shape.intermediate
    generator = torch.Generator(device).manual_seed(0)

    def draw(*extents: int) -> Tensor:
        return torch.randn(extents, dtype=bf16, device=device, generator=generator)

    chosen = torch.rand(shape.tokens, shape.experts, device=device, generator=generator).topk(shape.top_k).indices
    experts, order = chosen.flatten().sort(stable=True)
    token = (order // shape.top_k).to(torch.int32)
    if load is None:
        load = torch.bincount(experts, minlength=shape.experts)
    offsets = load.cumsum(0, dtype=torch.int32)
    row_scale = torch.rand(shape.rows, device=device, generator=generator)
    x, dy, h = draw(shape.tokens, hidden), draw(shape.tokens, hidden), draw(shape.rows, inner)
    w1, w2 = draw(shape.experts, 2 * inner, hidden), draw(shape.experts, hidden, inner)
    kept = draw(shape.rows, 2 * inner)  # the preactivation, and in its place the preactivation's gradient

    def fc1(options: KernelOptions) -> Call:
        run = functions.bind_grouped_gemm_activation(x, w1, None, row_scale, shape.glu, True, options, token)
        return lambda: _tensors(run(x, w1, None, offsets, row_scale, token))

    def fc2(options: KernelOptions) -> Call:
        run = functions.bind_grouped_gemm(h, w2, None, None, options)
        return lambda: (run(h, w2, None, offsets, None),)

    def derivative(options: KernelOptions) -> Call:
        bind = functions.bind_grouped_gemm_activation_backward
        run = bind(dy, w2, kept, row_scale, shape.glu, True, True, options, token)
        return lambda: _tensors(run(dy, w2, offsets, kept, row_scale, token))

    def fc1_input(options: KernelOptions) -> Call:
        run = functions.bind_grouped_gemm(kept, w1.mT, None, None, options)
        return lambda: (run(kept, w1.mT, None, offsets, None),)

    def weight(first: bool, into: Tensor | None) -> Callable[[KernelOptions], Call]:
        gathered: functions.WgradOperand = "x" if first else "grad_output"
        grad, rows = (kept, x) if first else (dy, h)
        dtype = bf16 if into is None else into.dtype

        def bind(options: KernelOptions) -> Call:
            added = into is not None
            run = functions.bind_grouped_wgrad(grad, rows, offsets, dtype, added, options, token, gathered)
            return lambda: (run(grad, rows, offsets, into, token),)

        return bind

    sum1, sum2 = torch.zeros_like(w1, dtype=torch.float32), torch.zeros_like(w2, dtype=torch.float32)
    return (
        Product("FC1 and the activation", fc1),
        Product("FC2", fc2),
        Product("FC2's input gradient and the activation's", derivative),
        Product("FC1's input gradient", fc1_input),
        Product("FC1's weight gradient", weight(True, None)),
        Product("FC2's weight gradient", weight(False, None)),
        Product("FC1's weight gradient, added", weight(True, sum1)),
        Product("FC2's weight gradient, added", weight(False, sum2)),
    )


def _tensors(results: Any) -> tuple[Tensor, ...]:
    return tuple(t for t in results if t is not None)


# -- candidates


@contextlib.contextmanager
def running(
    config: TileConfig, trial: str | None, load: Callable[[Kernel], Any] = compiler.load
) -> Iterator[list[Kernel]]:
    """Bind products with this configuration and this variant. Yield the list of the kernels that are bound."""
    bound: list[Kernel] = []

    def load_variant(kernel: Kernel) -> Any:
        variant = kernel if trial is None else TRIALS[trial](kernel)
        if variant is None:
            return _no_variant
        bound.append(variant)
        return load(variant)

    with (
        mock.patch.multiple(
            functions,
            choose=lambda problem: config,  # a function of its own: it is part of a launch's key
            _ragged_m_kernel=functions._ragged_m_kernel.__wrapped__,
            _ragged_k_kernel=functions._ragged_k_kernel.__wrapped__,
        ),
        mock.patch.object(compiler, "load", load_variant),
    ):
        yield bound


def _no_variant(*_: Any) -> None:
    raise AssertionError("this kernel has no such variant")


def configurations(product: Product) -> tuple[TileConfig, ...]:
    """Return the tile configurations that the product may run with."""
    problems: list[Problem] = []

    def record(problem: Problem) -> TileConfig:
        problems.append(problem)
        return choice.candidates(problem)[0]

    with mock.patch.multiple(functions, choose=record), mock.patch.object(compiler, "load", _compile_nothing):
        product.bind(KernelOptions())
    return choice.candidates(problems[0])


def _compile_nothing(kernel: Kernel) -> Callable[..., None]:
    return lambda *_: None


def candidates(product: Product) -> tuple[tuple[Candidate, Kernel], ...]:
    """Return the candidates of a product with their kernels, by tiles: the shipped kernel first, under the static
    schedule; the variants under the dynamic one only.
    """
    found = []
    for config in configurations(product):
        for trial in (None, *TRIALS):
            with running(config, trial, _compile_nothing) as bound:
                product.bind(KernelOptions())
            schedules = SCHEDULES if trial is None else SCHEDULES[-1:]
            found += [(Candidate(config, schedule, trial), bound[0]) for schedule in schedules if bound]
    return tuple(found)


def compile_all(kernels: Sequence[Kernel]) -> None:
    """Compile the kernels into the disk cache, one process per CPU."""
    context = multiprocessing.get_context("spawn")  # torch has threads, and a forked process with threads may hang
    with concurrent.futures.ProcessPoolExecutor(min(os.cpu_count() or 1, len(kernels)), context) as pool:
        list(pool.map(compiler.build, kernels))


# -- measurement


def measure(shape: Shape, device: torch.device, timer: Timer) -> dict[str, Any]:
    """Measure and print every product of a shape; return its entry of the result file."""
    print(f"\n{shape.name}: {shape.tokens} tokens", flush=True)
    of_shape = products(shape, device)
    found = {product.title: candidates(product) for product in of_shape}
    compile_all(tuple({kernel for some in found.values() for _, kernel in some}))
    entry = asdict(shape) | {"products": {}}
    for product in of_shape:
        rows = entry["products"][product.title] = measure_product(
            product, [candidate for candidate, _ in found[product.title]], timer, device
        )
        print(f"  {product.title}")
        for name, row in rows.items():
            bits = "" if row["same_bits"] else "  OTHER BITS"
            print(f"    {name:44}{row['ms']:9.4f}{row['back_to_back_ms']:9.4f}{bits}", flush=True)
    return entry


def measure_product(
    product: Product, some: Sequence[Candidate], timer: Timer, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Return milliseconds and equality of bits by the name of the candidate."""
    calls = {candidate.name: call_of(product, candidate) for candidate in some}
    same = same_bits(calls, some)
    times = timer.measure(calls)
    in_a_row = back_to_back(calls, device)
    return {
        name: {"ms": times[name].median_ms, "back_to_back_ms": in_a_row[name], "same_bits": same[name]}
        for name in calls
    }


def call_of(product: Product, candidate: Candidate) -> Call:
    """Return the call that computes the product with a candidate."""
    with running(candidate.config, candidate.trial):
        return product.bind(KernelOptions(schedule=candidate.schedule))


def same_bits(calls: dict[str, Call], some: Sequence[Candidate]) -> dict[str, bool]:
    """Whether each candidate's results equal those of the first one with the same tiles, bit for bit."""
    same: dict[str, bool] = {}
    reference: tuple[TileConfig, tuple[Tensor, ...]] | None = None
    for candidate in some:
        result = _from_zero(calls[candidate.name])
        if reference is None or reference[0] != candidate.config:
            reference = candidate.config, result
        same[candidate.name] = all(torch.equal(a, b) for a, b in zip(result, reference[1], strict=True))
    return same


def _from_zero(call: Call) -> tuple[Tensor, ...]:
    """Return the results of a call, as they are if a result that is added to something was zero before."""
    first = call()
    if first[0] is not call()[0]:
        return first
    first[0].zero_()
    return tuple(t.clone() for t in call())


def back_to_back(calls: dict[str, Call], device: torch.device) -> dict[str, float]:
    """Return the milliseconds of a call among calls that follow each other, calls in turns."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            call()
            start.record()
            for _ in range(IN_A_ROW):
                call()
            end.record()
            end.synchronize()
            taken[name].append(float(start.elapsed_time(end)) / IN_A_ROW)
    return {name: sorted(ms)[ROUNDS // 2] for name, ms in taken.items()}
