"""The launches of the grouped products: operands, an epilogue and tiles give a kernel and the arguments of launches.

`products` has the functions that the rules bind. `ragged_m` and `ragged_k` make a launch for everything that does not
change between calls, and keep it. A launch takes operands: tensors in bf16 or fp16, or `Codes`, in FP8.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fusedmoe.base.lasting import current_stream, lasting, unread
from fusedmoe.kernels.build import compiler
from fusedmoe.kernels.options import KernelOptions, Schedule
from fusedmoe.kernels.sm90.gemm.arguments import BESIDE
from fusedmoe.kernels.sm90.tiles.choice import WGRADS, Family, Problem, band
from fusedmoe.kernels.sm90.tiles.config import TileConfig
from fusedmoe.numerics.activations import Activation
from fusedmoe.numerics.formats import Format, ScaleRule

if TYPE_CHECKING:
    from fusedmoe.kernels.sm90.epilogue.outputs import Output

NAMES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2",
}  # fmt: skip


class CompiledIn(NamedTuple):
    """The parts of an activation that are compiled in."""

    kind: str
    clamped: bool
    interleaved: bool


def compiled_in(activation: Activation | None) -> CompiledIn | None:
    """Return the parts of an activation that are compiled in."""
    if activation is None:
        return None
    clamped = activation.limit is not None and math.isfinite(activation.limit)
    return CompiledIn(activation.kind, activation.gated and clamped, activation.gated and activation.interleaved)


def constants(activation: Activation | None) -> tuple[float, float, float]:
    """Return the constants of an activation, which are run-time numbers: limit, alpha and offset."""
    if activation is None:
        return 0.0, 1.0, 0.0
    return activation.limit or 0.0, activation.alpha, activation.offset


@functools.cache
def sm_count(device: torch.device) -> int:
    """Return the number of SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def sms_for(device: torch.device, options: KernelOptions) -> int:
    """Return the number of SMs that kernels may use."""
    return max(sm_count(device) - max(options.sm_margin, options.exchange_sms), 2)


def sms_for_tiles(device: torch.device, options: KernelOptions) -> int:
    """Return the number of SMs for which tiles are chosen."""
    return sms_for(device, replace(options, exchange_sms=0))


def ctas_for(sms: int, config: TileConfig) -> int:
    """Return the number of CTAs: one per SM, in whole clusters."""
    return sms // config.ctas * config.ctas


def scheduling(problem: Problem, config: TileConfig, sms: int) -> tuple[int, int]:
    """Return the scheduler's numbers: the band of row tiles, and CTAs."""
    return band(problem, config), ctas_for(sms, config)


class TileCounters:
    """The tile counters of a GPU. Each kernel leaves its counter zero, so no launch has to zero one.

    Launches on one stream follow each other, so a stream has one counter. A CUDA graph may be replayed on any stream,
    so each captured launch has its own.
    """

    SIZE = 1 << 16

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._table = lasting(lambda: torch.zeros(self.SIZE, dtype=torch.int32, device=device), device)
        self._of_stream: dict[int, tuple[Tensor, int]] = {}
        self._numbers = iter(range(self.SIZE))

    def get(self) -> tuple[Tensor, int]:
        """Return a counter for a launch now, and whether its schedule can be dynamic: not if all counters are taken."""
        if torch.cuda.is_current_stream_capturing():
            return self._new()
        stream = current_stream(self._device)
        found = self._of_stream.get(stream)
        if found is None:
            found = self._of_stream[stream] = self._new()
        return found

    def _new(self) -> tuple[Tensor, int]:
        number = next(self._numbers, None)
        return (no_counter(self._device), 0) if number is None else (self._table[number : number + 1], 1)


_tile_counters: dict[torch.device, TileCounters] = {}


def tile_counters(device: torch.device) -> TileCounters | None:
    """Return the tile counters of a GPU. None if a CUDA graph that is being captured would own their memory."""
    found = _tile_counters.get(device)
    if found is None and not torch.cuda.is_current_stream_capturing():
        found = _tile_counters.setdefault(device, TileCounters(device))
    return found


def tile_counter(device: torch.device, schedule: Schedule) -> tuple[Tensor, int]:
    """Return the tile counter of a launch now, and whether the launch is dynamic: only if there is a counter for it."""
    if schedule == "dynamic":
        counters = _tile_counters.get(device) or tile_counters(device)
        if counters is not None:
            return counters.get()
    return no_counter(device), 0


def may_begin_beside(device: torch.device, beside: bool) -> bool:
    """Return whether a product may begin ``beside`` the launch before it.

    Such a product has only some of the SMs at first, so it draws its tiles. Without tile counters, it begins in its
    turn. The launch before it uses no counter, and begins after all earlier ones have ended. So the product has the
    counter of the stream to itself. With deterministic algorithms, torch fills new tensors: the launch before the
    product is then the fill of its results, so it begins in its turn.
    """
    return beside and not torch.are_deterministic_algorithms_enabled() and tile_counters(device) is not None


def no_counter(device: torch.device) -> Tensor:
    """Return a tensor in place of a tile counter, which a static schedule does not read."""
    return unread(device, torch.int32, 1)


def placeholders(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return tensors in place of a missing bias and row scale, which the kernel does not read."""
    return unread(device, dtype, 1, 8), unread(device, torch.float32, 1)


# ------------------------------------------------------------------------------------------------ products


class Codes(NamedTuple):
    """An operand in FP8: codes and their scales, per block or, (E,), per expert."""

    codes: Tensor
    scale: Tensor


Operand: TypeAlias = Tensor | Codes
Scales = Literal["blocks", "expert"]  # what an operand's scales are for


def values_of(operand: Operand) -> Tensor:
    """Return the values of an operand, or its codes."""
    return operand.codes if isinstance(operand, Codes) else operand


def scales_of(operand: Operand) -> Scales | None:
    """Return what an operand's scales are for; None if it has none."""
    if not isinstance(operand, Codes):
        return None
    return "expert" if operand.scale.dim() == 1 else "blocks"


class Part(NamedTuple):
    """A part of a product: consecutive blocks of `bind_row_ranges`, or of `bind_expert_blocks`.

    ``beside``: it begins while the launch before it runs, if `may_begin_beside`. No argument may be a result of that
    launch.
    """

    ranges: Tensor
    beside: bool = False


class Epilogue(NamedTuple):
    """The parts of an epilogue that are compiled in."""

    activation: CompiledIn | None = None
    derivative: bool = False
    scaled: bool = False  # derivatives only: whether there is a row scale
    keep: bool = False  # of the preactivation, or of the recomputed activation
    quantized: Format | None = None
    forms: tuple[bool, bool, bool] | None = None  # of a derivative in FP8


@dataclass(frozen=True, kw_only=True)
class RaggedMKey:
    """Everything that determines the launch of a ragged M product."""

    choose: Callable[[Problem], TileConfig]  # `tuning.forced` replaces it
    family: Family
    device: torch.device
    dtype: torch.dtype  # of the operands
    scales: Scales | None
    rows: int
    experts: int
    columns: int
    depth: int
    b_major: str
    epilogue: Epilogue
    constants: tuple[float, float, float]
    biased: bool
    scale: torch.dtype | None  # dtype of the row scale
    options: KernelOptions
    gather: bool
    ranges: bool
    signals: bool = False  # whether the tiles of each block of ranges are counted


class RaggedMLaunch(NamedTuple):
    """The common part of all launches with the same key.

    ``run(a, b, offsets, bias, row_scale, *tensors)`` launches, of two operands. ``tensors`` are the index, if rows are
    gathered, the formula's input, and the outputs. With `RaggedMKey.ranges`, it launches once for each `Part` of an
    iterable in place of ``offsets``. This may be a generator: it waits for rows before it yields their ranges.
    """

    run: Callable[..., None]
    tile_m: int = 1  # rows of a tile
    tile_n: int = 1  # columns of a tile


@functools.lru_cache(maxsize=4096)
def ragged_m(key: RaggedMKey) -> RaggedMLaunch:
    """Make the launch of a ragged M product; cached, since that takes as long as a launch."""
    if not key.rows:
        return RaggedMLaunch(_of_parts(_no_kernel, key.device) if key.ranges else _no_kernel)
    device, schedule = key.device, key.options.schedule
    sms, of_tiles = sms_for(device, key.options), sms_for_tiles(device, key.options)
    problem = Problem(
        key.family, key.rows, key.experts, key.columns, key.depth, of_tiles, key.dtype.itemsize, key.gather
    )  # fmt: skip
    config = key.choose(problem)
    kernel = ragged_m_kernel(
        dtype=NAMES[key.dtype], scales=key.scales, b_major=key.b_major, epilogue=key.epilogue, config=config,
        gather=key.gather, ranges=key.ranges, signals=key.signals,
    )  # fmt: skip
    no_bias, no_scale = placeholders(device, key.dtype if key.scales is None else torch.bfloat16)
    # the fields of `RaggedMArguments` from ``limit`` to ``ctas``; to make that tuple in each launch takes 0.4 us
    numbers = (
        *key.constants,
        key.biased,
        key.scale is not None,
        key.options.zero_tail,
        *scheduling(problem, config, sms),
    )
    converts = key.scale not in (None, torch.float32)

    # functions and not methods, which take 0.3 us longer to call
    def run(
        a: Tensor,
        b: Tensor,
        offsets: Tensor,
        bias: Tensor | None,
        row_scale: Tensor | None,
        *tensors: Tensor,
        beside: bool = False,
    ) -> None:
        scale = no_scale if row_scale is None else row_scale.float() if converts else row_scale.contiguous()
        counter, dynamic = tile_counter(device, "dynamic" if beside else schedule)
        if beside:
            dynamic *= BESIDE  # without a counter, it begins in its turn
        kernel(a, b, offsets, no_bias if bias is None else bias, scale, counter, *numbers, dynamic, *tensors)

    def run_codes(
        a: Codes,
        b: Codes,
        offsets: Tensor,
        bias: Tensor | None,
        row_scale: Tensor | None,
        *tensors: Tensor,
        beside: bool = False,
    ) -> None:
        codes = a.codes.view(torch.uint8), b.codes.view(torch.uint8)
        run(*codes, offsets, bias, row_scale, a.scale, b.scale, *tensors, beside=beside)

    launch: Callable[..., None] = run if key.scales is None else run_codes
    return RaggedMLaunch(_of_parts(launch, device) if key.ranges else launch, config.tile_m, config.tile_n)


def _of_parts(launch: Callable[..., None], device: torch.device) -> Callable[..., None]:
    """Return the function that launches once for each part."""

    def run(a: Operand, b: Operand, parts: Iterable[Part], *others: Any) -> None:
        for ranges, beside in parts:
            launch(a, b, ranges, *others, beside=may_begin_beside(device, beside))

    return run


def _no_kernel(*_: Any, beside: bool = False) -> None:
    """Launch nothing: there are no rows."""


@dataclass(frozen=True, kw_only=True)
class RaggedKKey:
    """Everything that determines the launch of a ragged K product."""

    choose: Callable[[Problem], TileConfig]
    device: torch.device
    dtype: torch.dtype  # of the operands
    scales: Scales | None
    rows: int
    experts: int
    n: int
    k: int
    out: torch.dtype
    accumulate: bool
    gathered: str | None  # operand of the kernel: "a" or "b"
    options: KernelOptions
    beside: bool  # as `may_begin_beside` says


@functools.lru_cache(maxsize=4096)
def ragged_k(key: RaggedKKey) -> Callable[..., None]:
    """Make the launch of a ragged K product, of ``(a, b, offsets, out, *tensors)``: two operands, and the index of the
    rows, if an operand is gathered.
    """
    device, schedule = key.device, "dynamic" if key.beside else key.options.schedule
    sms, of_tiles = sms_for(device, key.options), sms_for_tiles(device, key.options)
    family = WGRADS[key.gathered] if key.scales is None else "fp8_wgrad"
    problem = Problem(family, key.rows, key.experts, key.k, key.n, of_tiles, key.dtype.itemsize)
    config = key.choose(problem)
    kernel = ragged_k_kernel(
        dtype=NAMES[key.dtype], scales=key.scales, config=config, out=NAMES[key.out], accumulate=key.accumulate,
        gathered=key.gathered, beside=key.beside,
    )  # fmt: skip
    numbers = scheduling(problem, config, sms)

    def run(a: Tensor, b: Tensor, offsets: Tensor, out: Tensor, *tensors: Tensor) -> None:
        counter, dynamic = tile_counter(device, schedule)
        kernel(
            a, b, offsets, out, counter, *numbers, dynamic, *tensors
        )  # the fields of `RaggedKArguments`, and tensors

    def run_codes(a: Codes, b: Codes, offsets: Tensor, out: Tensor) -> None:
        run(a.codes.view(torch.uint8), b.codes.view(torch.uint8), offsets, out, a.scale, b.scale)

    return run if key.scales is None else run_codes


# ------------------------------------------------------------------------------------------------ kernels


@functools.cache
def ragged_m_kernel(
    *,
    dtype: str,
    scales: Scales | None,
    b_major: str,
    epilogue: Epilogue,
    config: TileConfig,
    gather: bool,
    ranges: bool,
    signals: bool,
) -> Any:
    """Return the function that launches a ragged M kernel."""
    from fusedmoe.kernels.sm90.gemm.block_scales import BlockScaledRows  # deferred: imports the CuTe DSL
    from fusedmoe.kernels.sm90.gemm.operands import Plain
    from fusedmoe.kernels.sm90.gemm.ragged_m import RaggedM
    from fusedmoe.kernels.sm90.gemm.tensor_scales import TensorScaled

    kind: Any = {None: Plain, "blocks": BlockScaledRows, "expert": TensorScaled}[scales]
    return compiler.load(
        RaggedM(
            kind(dtype), config, b_major=b_major, epilogue=_compiled(epilogue), gather=gather, ranges=ranges,
            signals=signals,
        )
    )  # fmt: skip


def _compiled(epilogue: Epilogue) -> Any:
    """Return the epilogue that a kernel is compiled with."""
    from fusedmoe.kernels.sm90.epilogue import outputs as epilogues  # deferred: imports the CuTe DSL
    from fusedmoe.kernels.sm90.epilogue.codes_by_expert import CodesByExpert
    from fusedmoe.kernels.sm90.epilogue.derivative_codes import DerivativeCodes, derivative_codes
    from fusedmoe.kernels.sm90.epilogue.quantized import RowCodes

    activation, derivative, scaled, keep, quantized, forms = epilogue
    if activation is None:
        return epilogues.PLAIN
    if forms is not None:
        assert not activation.interleaved
        assert quantized is not None
        assert quantized.rule is ScaleRule.POWER_OF_TWO
        codes = DerivativeCodes(*forms, quantized.element.name)
        return derivative_codes(activation.kind, codes, clamped=activation.clamped, row_scale=scaled)
    if derivative:
        return epilogues.derivative(**activation._asdict(), keep=keep, row_scale=scaled)
    result: Output | None = None
    if quantized is not None and quantized.block[1] is None:
        result = CodesByExpert(quantized.element.name)
    elif quantized is not None:
        result = RowCodes(quantized.element.name, quantized.rule is ScaleRule.POWER_OF_TWO)
    return epilogues.activation(**activation._asdict(), keep=keep, result=result)


@functools.cache
def ragged_k_kernel(
    *,
    dtype: str,
    scales: Scales | None,
    config: TileConfig,
    out: str,
    accumulate: bool,
    gathered: str | None,
    beside: bool,
) -> Any:
    """Return the function that launches a ragged K kernel."""
    from fusedmoe.kernels.sm90.gemm.block_scales_k import BlockScaledColumns  # deferred: imports the CuTe DSL
    from fusedmoe.kernels.sm90.gemm.operands import Plain
    from fusedmoe.kernels.sm90.gemm.ragged_k import RaggedK
    from fusedmoe.kernels.sm90.gemm.tensor_scales import TensorScaled

    kind: Any = {None: Plain, "blocks": BlockScaledColumns, "expert": TensorScaled}[scales]
    return compiler.load(RaggedK(kind(dtype), config, out=out, accumulate=accumulate, gathered=gathered, beside=beside))
