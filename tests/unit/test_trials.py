"""Variants of kernels that are not shipped: which kernels have one, their machine code, and their measurement."""

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl, which compiles the kernels")

from test_sm90_compile import compile_and_disassemble, tool

from benchmarks.shapes import Shape
from benchmarks.trials import run
from benchmarks.trials.explicit_fences import ExplicitFences
from benchmarks.trials.late_stores import LateStoresK, LateStoresM
from benchmarks.trials.run import Candidate, Product
from benchmarks.trials.short_ring import ShortRingK, ShortRingM
from fusedmoe.bench.timing import CpuTimer
from fusedmoe.kernels.compiler import SYMBOL
from fusedmoe.kernels.sm90 import choice, functions, launch
from fusedmoe.kernels.sm90.choice import CANDIDATES, CO_256, CO_256_TALL, PP_128, PP_192
from fusedmoe.kernels.sm90.ragged_k import RaggedK
from fusedmoe.kernels.sm90.ragged_m import RaggedM

CPU = torch.device("cpu")
TINY = Shape("tiny", 64, 32, 16, 4, 2)


@pytest.fixture
def of_products(monkeypatch):
    monkeypatch.setattr(launch, "sm_count", lambda device: 132)
    return {product.title: run.candidates(product) for product in run.products(TINY, CPU)}


def test_every_product_of_a_step_has_all_its_tiles_under_both_schedules(of_products):
    assert len(of_products) == 8
    for some in of_products.values():
        shipped = [candidate for candidate, _ in some if candidate.trial is None]
        assert {candidate.schedule for candidate in shipped} == set(run.SCHEDULES)
        assert {candidate.schedule for candidate, _ in some if candidate.trial} == {"dynamic"}
        assert len(shipped) == 2 * len({candidate.config for candidate in shipped})
        assert len({candidate.name for candidate, _ in some}) == len(some)
        assert some[0][0] == Candidate(shipped[0].config, "static", None)


def test_the_products_are_those_of_a_layer(of_products):
    assert [some[0][1].symbol.replace(some[0][0].config.name, "*") for some in of_products.values()] == [
        "sm90_ragged_m_gather_bf16_bk_swiglu_keep_*",
        "sm90_ragged_m_bf16_bk_plain_*",
        "sm90_ragged_m_gather_bf16_bn_dswiglu_scale_keep_*",
        "sm90_ragged_m_bf16_bn_plain_*",
        "sm90_ragged_k_gather_b_bf16_bf16_*",
        "sm90_ragged_k_gather_a_bf16_bf16_*",
        "sm90_ragged_k_gather_b_bf16_fp32_add_*",
        "sm90_ragged_k_gather_a_bf16_fp32_add_*",
    ]


def test_variants_have_symbols_and_sources_of_their_own(of_products):
    kernels = [kernel for some in of_products.values() for candidate, kernel in some if candidate.trial]
    shipped = {kernel.symbol for some in of_products.values() for candidate, kernel in some if not candidate.trial}
    assert kernels
    for kernel in kernels:
        assert SYMBOL.fullmatch(kernel.symbol)
        assert kernel.symbol not in shipped
        assert type(kernel).__module__ in kernel.sources


def of(trial, of_products):
    return {kernel for some in of_products.values() for candidate, kernel in some if candidate.trial == trial}


def test_cooperative_products_without_an_activation_have_late_stores(of_products):
    late = of("late stores", of_products)
    wgrads = {config for family in ("wgrad_gathered_a", "wgrad_gathered_b") for config in CANDIDATES[family]}
    wanted = {RaggedK: wgrads, RaggedM: set(CANDIDATES["plain"])}
    for kind, configs in wanted.items():
        found = {kernel.config for kernel in late if isinstance(kernel, kind)}
        assert found == {config for config in configs if not config.pingpong}
    # a buffer in shared memory is used again after `store_stages` boxes; parts of a tile are stored without the others
    assert all(kernel.kept // 2 % kernel.store_stages == 0 for kernel in late)
    with pytest.raises(ValueError, match="expected cooperative tiles, got 128x192pp_c21"):
        LateStoresK("bf16", PP_192)


def test_every_product_has_a_short_ring_and_every_sum_has_fences(of_products):
    shipped = {kernel for some in of_products.values() for candidate, kernel in some if not candidate.trial}
    assert len(of("short ring", of_products)) == len(shipped)
    assert len(of("explicit fences", of_products)) == len([k for k in shipped if getattr(k, "accumulate", False)]) > 0


def test_grouped_stores_are_those_that_spill_no_more(of_products):
    names = {trial for some in of_products.values() for candidate, _ in some if (trial := candidate.trial)}
    grouped = {name: of(name, of_products) for name in names if name.startswith("grouped")}
    assert len(grouped) == 4
    plain = {kernel for some in of_products.values() for candidate, kernel in some if not candidate.trial}
    several = [kernel for kernel in plain if isinstance(kernel, RaggedM) and kernel.epilogue.boxes > 1]
    assert len(grouped["grouped stores"]) == len(several)
    for name, kernels in grouped.items():
        assert all(kernel.ahead == ("ahead" in name) and kernel.in_place == ("in place" in name) for kernel in kernels)
    assert {k.config for k in grouped["grouped stores, in place, ahead"]} == {PP_128}
    for buffers, name in ((3, "three buffers"), (4, "four buffers")):
        assert {(k.config, k.store_stages) for k in of(name, of_products)} == {(PP_128, buffers)}


@pytest.mark.parametrize(
    "kernel",
    [
        LateStoresK("bf16", CO_256_TALL, gathered="b"),
        LateStoresK("bf16", CO_256_TALL, out="fp32", accumulate=True, gathered="b"),
        LateStoresM("bf16", CO_256, b_major="n"),
        ExplicitFences("bf16", CO_256_TALL, out="fp32", accumulate=True, gathered="b"),
    ],
    ids=lambda kernel: kernel.symbol,
)
def test_products_overlap(kernel):
    """Three waits: after the first products, in the main loop, and at its end; else ptxas serializes the products."""
    report = compile_and_disassemble(kernel, tool("nvdisasm"), tool("cuobjdump"))
    assert [opcode for opcode in report.opcodes if opcode.startswith("WARPGROUP.DEPBAR")] == ["WARPGROUP.DEPBAR.LE"] * 3
    products = [opcode for opcode in report.opcodes if opcode.startswith("HGMMA")]
    assert len(products) == 2 * 4 * kernel.config.blocks
    assert not [opcode for opcode in report.opcodes if opcode.startswith(("STL", "LDL"))]
    stores = [opcode for opcode in report.opcodes if opcode.startswith(("UTMASTG", "UTMAREDG"))]
    boxes = kernel.config.blocks * kernel.boxes_per_block
    # after the last tile, the boxes that are kept are stored by other code
    assert len(stores) == boxes + getattr(kernel, "kept", 0)


def test_a_short_ring_has_two_slots():
    waits = {}
    for kind in (RaggedM, ShortRingM):
        report = compile_and_disassemble(kind("bf16", PP_192), tool("nvdisasm"), tool("cuobjdump"))
        waits[kind] = len([opcode for opcode in report.opcodes if opcode.startswith("SYNCS")])
    # the barriers of a slot are initialised, one instruction each
    assert waits[RaggedM] - waits[ShortRingM] == 2 * (4 - 2)
    assert ShortRingK("bf16", PP_192).sources[0] == "benchmarks.trials.short_ring"


# -- measurement


def bound(value, options, used):
    used.append(options.schedule)
    return lambda: (torch.full((3,), value),)


def test_results_are_compared_bit_by_bit(monkeypatch):
    monkeypatch.setattr(run, "back_to_back", lambda calls, device: dict.fromkeys(calls, 2.0))
    values, used = iter([1.0, 1.0, 5.0, 4.0]), []
    product = Product("some", lambda options: bound(next(values), options, used))
    some = [Candidate(PP_192, schedule, None) for schedule in run.SCHEDULES]
    some += [Candidate(CO_256, schedule, None) for schedule in run.SCHEDULES]
    rows = run.measure_product(product, some, CpuTimer(1), CPU)
    assert [row["same_bits"] for row in rows.values()] == [True, True, True, False]
    assert list(rows) == [f"{config.name}, {s}" for config in (PP_192, CO_256) for s in ("static", "dynamic")]
    assert used == ["static", "dynamic"] * 2
    assert all(row["back_to_back_ms"] == 2.0 for row in rows.values())


def test_a_result_that_is_added_to_starts_from_zero():
    total = torch.full((4,), 7.0)
    (result,) = run._from_zero(lambda: (total.add_(2.0),))
    assert result.tolist() == [2.0] * 4
    assert total is not result


def test_shapes_with_few_rows_per_expert_are_measured_too():
    pytest.importorskip("tomllib")
    found = run.measured_shapes()
    assert len({shape.name for shape in found}) == len(found) == 6
    assert [shape.rows // shape.experts for shape in found] == [1536, 2048, 2048, 1536, 512, 512]


def test_afterwards_the_shipped_kernels_run(of_products):
    assert functions.choose is choice.choose
    assert functions._ragged_k_kernel.__wrapped__
