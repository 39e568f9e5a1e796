"""Measurement of every candidate for an expert MLP's products on this GPU, for ``fusedmoe tune`` only.

Axes: R rows, E experts, H hidden, I intermediate, N features of the first layer (2 I if gated).
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from fusedmoe.kernels.options import DEFAULT
from fusedmoe.kernels.sm90 import products as functions
from fusedmoe.kernels.sm90.tiles.choice import WGRADS, Family, Problem, candidates
from fusedmoe.kernels.sm90.tiles.config import TileConfig
from fusedmoe.numerics.activations import KINDS, Activation

FLUSH_BYTES = 256 << 20  # five times the L2
SPIN_CYCLES = 1 << 20  # that the GPU spins before a timed call: longer than the host needs to enqueue the call
WARM_UP = 3  # untimed calls per candidate

ACTIVATIONS = {
    "swiglu": Activation("swiglu"),
    "clamped_swiglu": Activation("swiglu", limit=7.0, alpha=1.702, offset=1.0),
    **{kind: Activation(kind) for kind in KINDS},
}


@dataclass(frozen=True)
class Mlp:
    """The expert MLP to tune, with R rows distributed over the experts at random.

    ``activation`` is one of `ACTIVATIONS`, ``dtype`` "bf16" or "fp16". ``top_k`` rows belong to each token: gathered
    rows are those of R / top_k tokens.
    """

    hidden: int
    intermediate: int
    experts: int
    rows: int
    activation: str = "swiglu"
    dtype: str = "bf16"
    top_k: int = 1


@dataclass(frozen=True)
class Product:
    """One product of the MLP."""

    title: str
    problem: Problem
    across: bool = False  # the weight has unit stride along the result's columns, as in an input's gradient

    @property
    def flops(self) -> float:
        """``2 R N K``."""
        return 2.0 * self.problem.rows * self.problem.columns * self.problem.depth


Measure = Callable[[Mlp, Product, int, Callable[[str], None]], "dict[TileConfig, float]"]  # type of `measure`


def products(mlp: Mlp, sms: int) -> tuple[Product, ...]:
    """Return the products of a training step of the MLP, with rows in order and, as a layer runs them, gathered."""
    activation = ACTIVATIONS[mlp.activation]
    h, i, n = mlp.hidden, mlp.intermediate, mlp.intermediate * (2 if activation.gated else 1)
    heavy = activation.heavy

    def product(title: str, family: Family, columns: int, depth: int, across: bool = False) -> Product:
        return Product(title, Problem(family, mlp.rows, mlp.experts, columns, depth, sms), across)

    def gathered(product: Product) -> Product:
        title = f"{product.title}, gathered rows"
        return replace(product, title=title, problem=replace(product.problem, gathered=True))

    fc1 = product("FC1 and the activation", "activation", n, h)
    derivative: Family = "heavy_derivative" if heavy else "derivative"
    dfc2 = product("FC2's input gradient and the activation's", derivative, i, h, True)
    return (
        fc1,
        product("FC2", "plain", h, i),
        dfc2,
        product("FC1's input gradient", "plain", h, n, True),
        product("FC1's weight gradient", "wgrad", h, n),
        product("FC2's weight gradient", "wgrad", i, h),
        gathered(fc1),
        gathered(dfc2),
        product("FC1's weight gradient, gathered rows", "wgrad_gathered_b", h, n),
        product("FC2's weight gradient, gathered rows", "wgrad_gathered_a", i, h),
    )


def measure(mlp: Mlp, product: Product, reps: int, advance: Callable[[str], None]) -> dict[TileConfig, float]:
    """Time each candidate: the median of ``reps`` calls in milliseconds, candidates in turns, with a cold L2.

    ``advance`` is called with a candidate's name when it is compiled and warm. That takes far longer than timing it.
    """
    bind = binder(mlp, product)
    calls: dict[TileConfig, Callable[[], object]] = {}
    for config in candidates(product.problem):
        with forced(config):
            calls[config] = bind()
        for _ in range(WARM_UP):
            calls[config]()
        advance(f"{product.title}, {config.name}")
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    taken: dict[TileConfig, list[float]] = {config: [] for config in calls}
    for _ in range(reps):
        for config, call in calls.items():
            taken[config].append(_gpu_ms(call, flush))
    return {config: statistics.median(ms) for config, ms in taken.items()}


@contextlib.contextmanager
def forced(config: TileConfig) -> Iterator[None]:
    """Bind every product of the process with this configuration."""
    names = vars(functions)
    before = names["choose"]
    names["choose"] = lambda problem: config
    try:
        yield
    finally:
        names["choose"] = before


def _gpu_ms(call: Callable[[], object], flush: torch.Tensor) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    flush.zero_()
    torch.cuda._sleep(SPIN_CYCLES)  # without it, gaps between launches would be measured
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def binder(mlp: Mlp, product: Product, device: str = "cuda") -> Callable[[], Callable[[], object]]:
    """Return a function that binds the product, and returns it as a call on tensors that are allocated here."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[mlp.dtype]
    activation = ACTIVATIONS[mlp.activation]
    p = product.problem
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        # normal data, as in a model: a GPU's clock depends on the number of bits that change
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    # random routing: equal numbers of rows would keep the CTAs in step, which slows some tiles by half
    chosen = torch.randint(p.experts, (p.rows,), device=device, generator=generator)
    offsets = torch.bincount(chosen, minlength=p.experts).cumsum(0, dtype=torch.int32)
    # the rows of an expert are in token order, as `Dispatch` sorts them
    token = (torch.argsort(chosen, stable=True) // mlp.top_k).to(torch.int32)
    tokens = -(-p.rows // mlp.top_k)
    if p.family in WGRADS.values():
        gathered = next(o for o, of_kernel in functions.KERNEL_OPERAND.items() if WGRADS[of_kernel] == p.family)
        grad = draw(tokens if gathered == "grad_output" else p.rows, p.depth)
        x = draw(tokens if gathered == "x" else p.rows, p.columns)
        gather = None if gathered is None else token
        return lambda: partial(
            functions.bind_grouped_wgrad(grad, x, offsets, dtype, False, DEFAULT, gather, gathered),
            grad, x, offsets, None, gather,
        )  # fmt: skip
    gather = token if p.gathered else None
    rows = draw(tokens if p.gathered else p.rows, p.depth)
    weight = draw(p.experts, p.depth, p.columns).mT if product.across else draw(p.experts, p.columns, p.depth)
    given = rows, weight, None, offsets, None, gather
    if p.family in ("activation", "transposed_activation"):
        forward = functions.bind_grouped_gemm_activation
        return lambda: partial(forward(rows, weight, None, None, activation, True, DEFAULT, gather), *given)
    if p.family == "plain":
        return lambda: partial(functions.bind_grouped_gemm(rows, weight, None, None, DEFAULT, gather), *given)
    kept = draw(p.rows, p.columns * (2 if activation.gated else 1))
    backward = functions.bind_grouped_gemm_activation_backward
    return lambda: partial(
        backward(rows, weight.mT, kept, None, activation, True, False, DEFAULT, gather),
        rows, weight.mT, offsets, kept, None, gather,
    )  # fmt: skip
