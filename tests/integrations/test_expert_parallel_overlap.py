"""The Hopper rules that compute while tokens travel have the bits of separate steps: ranks on a CPU, with stand-ins."""

import contextlib

import pytest
import torch
from kit import hopper_ranks as hopper
from kit.compare import pairwise
from kit.expert_parallel_ranks import alone, on_each
from kit.hopper_ranks import (
    ARRIVING_CODES,
    ARRIVING_GRADIENTS,
    EXPERTS,
    FP8_OTHERS,
    FP8_OVERLAPS,
    GRADIENTS_AS_CODES,
    MOST,
    OTHERS,
    OVERLAPS,
)
from kit.lifetimes import cycles

import fusedmoe as fm
from fusedmoe.numerics.formats import E5M2, Quantizer, fp8_block

pytestmark = pytest.mark.distributed

EVEN, UNEVEN = (50, 50), (37, 50)


@on_each
def compare(
    ep, tokens, training=True, main_grad=False, divided=None, disabled=(OTHERS,) * 4, symmetric=None, quick=False,
    fp8=False, weights=None, autocast=False, by_experts=False, own_first=False, capacity=None, least_tiles=0,
):  # fmt: skip
    """Results with overlaps, which are those without them bit for bit; the names of the rules that ran, how many ran in
    ranges of rows, and the numbers of blocks of their launches.

    ``divided``: the experts whose rows come in ranges, by rank, None for those that the rules choose. ``disabled``: the
    rules that each rank does without. ``symmetric``: arguments of `on_cpus`, for the engine of that name. ``quick``:
    whether the exchange of so few tokens is taken as quick. ``fp8``: whether the recipe is "fp8_block". ``weights``:
    the dtype of routing weights of the caller. ``autocast``: whether autocast casts the weights, which are fp32.
    ``by_experts``: whether products follow arriving rows by blocks of experts, although there are few; ``own_first``:
    then own rows first, and sums leave in halves, although there are few rows. ``capacity``: that of ``ep``.
    ``least_tiles``: of an expert's own rows, if the derivative of codes follows ranks.
    """
    kernels = hopper.stand_ins()
    from fusedmoe.builtin_rules.exchange import arriving, arriving_codes, beside, leaving

    def given(*args):
        return beside.experts_beside(*args) if divided is None else divided[ep.rank]

    arriving.experts_beside = arriving_codes.experts_beside = leaving.experts_beside = given
    # few tokens, as if they were many; or as few as they are
    beside.QUICK_US, beside.MEMORY_GB_S = (6.0, 3000) if quick else (0.0, 1e12)  # a rank runs several tests
    arriving_codes.LEAST_TILES = 1 if quick else least_tiles
    beside.LEAST_BLOCKS = 2 if by_experts else 1000
    beside.OWN_TILES = beside.HALF_TILES = beside.HALF_EXPERTS = 0 if own_first else 1000
    count, sizes, before = tokens[ep.rank], (128, 128) if fp8 else (), hopper.kernels_ran.copy()
    with contextlib.ExitStack() as stack:
        stack.enter_context(fm.recipe("fp8_block" if fp8 else "bf16"))
        stack.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=autocast))
        dtype = torch.float32 if autocast else torch.bfloat16
        with fm.disabled(*OVERLAPS, *FP8_OVERLAPS, ARRIVING_CODES, ARRIVING_GRADIENTS, GRADIENTS_AS_CODES):
            expected = hopper.trained(hopper.layer(ep, main_grad, *sizes).to(dtype), count, training, weights)
        other = ep
        if symmetric is not None:
            stack.enter_context(hopper.on_cpus(*symmetric))
            more = {} if capacity is None else {"capacity": capacity, "overflow": "drop"}
            other = fm.ExpertParallel(ep.group, "symmetric", max_tokens=MOST, dispatch_dtype=ep.dispatch_dtype, **more)
        stack.enter_context(fm.disabled(*disabled[ep.rank]))
        for _ in range(1 if symmetric is None else 2):  # the second layer finds the buffers of the first
            kernels.calls.clear()
            made = hopper.layer(other, main_grad, *sizes).to(dtype)
            got = hopper.trained(made, count, training, weights)
        calls = [*kernels.calls]
        written = {what["dtype"] for name, what in calls if name in ("grouped_wgrad", "block_scaled_wgrad")}
        assert written == ({torch.float32 if autocast or main_grad else torch.bfloat16} if training else set())
        assert not any(what["options"].zero_tail for _, what in calls if "options" in what)
        used = hopper.rules_of(made, count, training)
    assert got.keys() == expected.keys()
    assert len(got) > 3 or not training
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
        assert value.float().norm() > 0 or not value.numel() or min(tokens) == 0, name
    followed = symmetric is not None and by_experts and not quick and bool(used)
    assert (hopper.kernels_ran - before)["pull by experts"] == 2 * (1 + training) * followed
    beside_product = symmetric is not None and not quick and any("gemm_of_leaving_rows" in rule for rule in used)
    assert bool((hopper.kernels_ran - before)["push sums beside their product"]) == beside_product
    assert bool((hopper.kernels_ran - before)["push sums by experts"]) == (beside_product and by_experts)
    in_halves = beside_product and by_experts and own_first
    assert bool((hopper.kernels_ran - before)["push sums in halves"]) == in_halves
    parts = {what["of_launch"] for name, what in calls if name == "ranges"}
    return used, sum(name in ("row_ranges", "expert_blocks") for name, _ in calls), parts


AGREED, MOST_TOKENS = {}, {"max_tokens": MOST}
CODES = MOST_TOKENS | {"dispatch_dtype": torch.float8_e4m3fn}
FORWARD = {"sm90.gemm_activation_of_arriving_tokens", "sm90.gemm_of_leaving_rows"}
# ranks, settings, tokens, options of `compare`, the rules, the launches in ranges of rows
CASES = {
    "even": (2, MOST_TOKENS, EVEN, {}, OVERLAPS.keys(), 3),
    "uneven": (2, AGREED, UNEVEN, {}, OVERLAPS.keys(), 3),
    "none on one rank": (2, MOST_TOKENS, (0, 41), {}, OVERLAPS.keys(), 3),
    "few": (2, AGREED, (1, 2), {}, OVERLAPS.keys(), 3),
    "no gradients": (2, MOST_TOKENS, UNEVEN, {"training": False}, FORWARD, 2),
    "main_grad": (2, MOST_TOKENS, UNEVEN, {"main_grad": True}, OVERLAPS.keys(), 3),
    "autocast": (2, MOST_TOKENS, UNEVEN, {"autocast": True}, OVERLAPS.keys(), 3),
    "no expert in ranges": (2, MOST_TOKENS, UNEVEN, {"divided": (0, 0)}, OVERLAPS.keys(), 3),
    "one expert of rank 0 in ranges": (2, MOST_TOKENS, UNEVEN, {"divided": (1, 0)}, OVERLAPS.keys(), 3),
    # the parts of a token are summed by one kernel
    "four ranks": (4, MOST_TOKENS, (50, 37, 0, 44), {}, OVERLAPS.keys(), 3),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_have_the_bits_of_separate_steps(hopper_ranks, case):
    size, settings, tokens, options, rules, launches = case
    for used, launched, parts in hopper_ranks.run(compare, size, settings, tokens, **options)[:size]:
        assert used == rules
        assert launched == launches
        assert parts == {1, size - 1}


def test_ranks_may_choose_different_steps(hopper_ranks):
    (first, *_), (second, *_), *_ = hopper_ranks.run(compare, 2, MOST_TOKENS, EVEN, disabled=(OTHERS, OVERLAPS))
    assert first == OVERLAPS.keys()
    assert not second


# the rules that each rank does without
WITHOUT = {
    "plain steps": (OVERLAPS, OVERLAPS),
    "overlaps": (OTHERS, OTHERS),
    "overlaps on one rank": (OTHERS, OVERLAPS),
    "overlaps on the other": (OVERLAPS, OTHERS),
}


CASES_OF_RANKS = pairwise([*WITHOUT], [(50, 50), (37, 50), (0, 41)], [True, False])


@pytest.mark.parametrize(("by_experts", "own_first"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("case", "tokens", "quick"), CASES_OF_RANKS, ids=str)
def test_the_engine_symmetric_has_the_bits_of_allgather(
    hopper_ranks, folder, case, tokens, quick, by_experts, own_first
):  # fmt: skip
    options = {"disabled": WITHOUT[case], "symmetric": (folder,), "quick": quick}
    options |= {"by_experts": by_experts, "own_first": own_first}
    found = hopper_ranks.run(compare, 2, MOST_TOKENS, tokens, **options)[:2]
    for (used, launched, _), without in zip(found, WITHOUT[case], strict=True):
        assert bool(used) == (without is OTHERS)
        assert bool(launched) == (without is OTHERS and not quick)


def test_the_engine_symmetric_on_four_ranks(hopper_ranks, folder):
    options = {"disabled": (OTHERS, OVERLAPS, OTHERS, OTHERS), "symmetric": (folder,)}
    for used, *_ in hopper_ranks.run(compare, 4, MOST_TOKENS, (50, 37, 0, 44), **options):
        assert used <= OVERLAPS.keys()


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("codes", [False, True])
def test_no_conversion_of_routing_weights_keeps_a_product_from_following_rows(hopper_ranks, folder, weights, codes):
    """The stand-in of a product that begins beside `Pull` takes a row scale in fp32 only. Experts of transformers have
    weights in the dtype of the tokens.
    """
    options = {"symmetric": (folder,), "weights": weights, "fp8": codes}
    settings, others = (CODES, FP8_OTHERS) if codes else (MOST_TOKENS, OTHERS)
    for used, launched, parts in hopper_ranks.run(compare, 2, settings, UNEVEN, disabled=(others,) * 4, **options)[:2]:
        assert ARRIVING_CODES in used if codes else used == OVERLAPS.keys()
        assert ARRIVING_GRADIENTS in used or not codes
        assert launched == 3
        assert 2 in parts


@on_each
def declined(ep, reason, expected, most_ranks=32):
    """The rules that decline for a reason; the others keep the bits of separate steps."""
    hopper.stand_ins()
    from fusedmoe.builtin_rules.exchange import beside

    before, beside.MOST_RANKS = beside.MOST_RANKS, most_ranks
    if expected is None:
        ep = alone(max_tokens=MOST)
    made = hopper.layer(ep)
    with fm.disabled(*OVERLAPS):
        want = hopper.trained(hopper.layer(ep), 40)
    with fm.disabled(*{others[0] for others in OVERLAPS.values()}):
        got = hopper.trained(made, 40)
        plan = made.explain(torch.zeros(40, hopper.HIDDEN, dtype=hopper.BF16, requires_grad=True))
    beside.MOST_RANKS = before
    assert all(torch.equal(got[name], value) for name, value in want.items())
    assert got["y"].any()
    return {step.rule for step in plan.steps} & OVERLAPS.keys(), {
        attempt.rule for p in plan.plans for attempt in p.attempts if reason in attempt.reason
    }


ARRIVING = {name for name in OVERLAPS if "arriving" in name}
OF_RANGES = ARRIVING | FORWARD


@pytest.mark.parametrize(("settings", "reason", "rules", "more"), [
    (MOST_TOKENS | {"dispatch_dtype": torch.float8_e4m3fn}, "arrive as codes of torch.float8_e4m3fn", ARRIVING, {}),
    ({}, "one rank exchanges nothing", None, {}),
    (MOST_TOKENS, "2 ranks: the kernel that divides rows by ranks has at most 1", OF_RANGES, {"most_ranks": 1}),
], ids=["codes", "one rank", "many ranks"])  # fmt: skip
def test_what_the_rules_decline(hopper_ranks, settings, reason, rules, more):
    expected = OVERLAPS.keys() if rules is None else rules
    for used, found in hopper_ranks.run(declined, 2, settings, reason, rules, **more)[:2]:
        assert used == OVERLAPS.keys() - expected
        assert found - {GRADIENTS_AS_CODES} == expected


@pytest.mark.parametrize(("size", "tokens", "options"), [
    (2, UNEVEN, {}), (2, (0, 41), {"main_grad": True}), (4, (50, 37, 0, 44), {}), (2, UNEVEN, {"training": False}),
    (2, EVEN, {"symmetric": True}), (4, (50, 37, 0, 44), {"symmetric": True}),
    (2, UNEVEN, {"symmetric": True, "quick": True}),
])  # fmt: skip
def test_results_in_fp8_have_the_bits_of_separate_steps(hopper_ranks, folder, size, tokens, options):
    if "symmetric" in options:
        options = options | {"symmetric": (folder,)}
    found = hopper_ranks.run(compare, size, MOST_TOKENS, tokens, fp8=True, disabled=(FP8_OTHERS,) * 4, **options)
    for used, launched, _ in found[:size]:
        assert used == {*FP8_OVERLAPS} if options.get("training", True) else {"sm90.fp8_gemm_of_leaving_rows"}
        assert launched == (0 if options.get("quick") else 1)


@pytest.mark.parametrize(("size", "tokens", "options"), [
    (2, UNEVEN, {}), (4, (50, 37, 0, 44), {"training": False}), (2, (0, 41), {}), (2, EVEN, {"symmetric": True}),
    (4, (50, 37, 0, 44), {"symmetric": True}), (2, UNEVEN, {"symmetric": True, "training": False}),
    (2, UNEVEN, {"symmetric": True, "divided": (1, 0)}), (2, UNEVEN, {"symmetric": True, "quick": True}),
    (2, (0, 41), {"symmetric": True, "main_grad": True}), (2, UNEVEN, {"symmetric": True, "autocast": True}),
])  # fmt: skip
def test_codes_that_arrive_are_the_operand_of_the_product(hopper_ranks, folder, size, tokens, options):
    """The bits of tokens that are dequantized, and quantized again by separate steps."""
    if "symmetric" in options:
        options = options | {"symmetric": (folder,)}
    found = hopper_ranks.run(compare, size, CODES, tokens, fp8=True, disabled=(FP8_OTHERS,) * 4, **options)
    training, symmetric = options.get("training", True), "symmetric" in options
    gradients = ARRIVING_GRADIENTS if symmetric else GRADIENTS_AS_CODES
    backward = {gradients, "sm90.fp8_wgrad_beside_exchange"} if training else set()
    by_kernels = symmetric and not options.get("quick")
    for used, launched, parts in found[:size]:
        assert used == {ARRIVING_CODES, "sm90.fp8_gemm_of_leaving_rows"} | backward
        assert launched == (2 + training if by_kernels else 0 if options.get("quick") else 1)
        assert (size in parts) is by_kernels


def test_the_derivative_of_codes_waits_for_all_ranks_if_experts_have_few_own_rows(hopper_ranks, folder):
    options = {"symmetric": (folder,), "fp8": True, "least_tiles": 1, "disabled": (FP8_OTHERS,) * 4}
    for used, launched, _ in hopper_ranks.run(compare, 2, CODES, UNEVEN, **options)[:2]:
        assert ARRIVING_GRADIENTS in used
        assert launched == 2


@on_each
def kept_by_cycles(ep, folder, tokens):
    """The tensors that only cycles of references keep after a step."""
    hopper.stand_ins()
    with hopper.on_cpus(folder), fm.recipe("fp8_block"), fm.disabled(*FP8_OTHERS):
        other = fm.ExpertParallel(ep.group, "symmetric", max_tokens=MOST, dispatch_dtype=ep.dispatch_dtype)
        made = hopper.layer(other, False, 128, 128)
        hopper.trained(made, tokens[ep.rank])  # plans are made
        with cycles() as kept:
            hopper.trained(made, tokens[ep.rank])
        return kept, hopper.rules_of(made, tokens[ep.rank])


def test_tokens_and_gradients_of_a_step_are_freed_after_it(hopper_ranks, folder):
    for wire in (CODES, MOST_TOKENS):
        for kept, rules in hopper_ranks.run(kept_by_cycles, 2, wire, folder, UNEVEN)[:2]:
            assert kept == []
            assert ({ARRIVING_CODES, ARRIVING_GRADIENTS} <= rules) is (wire is CODES)


@pytest.mark.parametrize("capacity", [0.5, 1.2])
def test_codes_with_a_capacity(hopper_ranks, folder, capacity):
    options = {"symmetric": (folder,), "fp8": True, "capacity": capacity, "disabled": (FP8_OTHERS,) * 4}
    settings = CODES | {"capacity": capacity, "overflow": "drop"}
    for used, launched, _ in hopper_ranks.run(compare, 2, settings, UNEVEN, **options)[:2]:
        assert {ARRIVING_CODES, ARRIVING_GRADIENTS} <= used
        assert launched == 3


def chain_of(ep, forward="fp8_block", grad="fp8_block", result="fp8_block", scale=True, weights=None):
    """The experts of a layer with quantizers: of the second layer's input and gradient, and of the first one's."""
    here = {"num_groups": EXPERTS // ep.ranks, "dtype": torch.bfloat16, "expert_parallel": ep}
    return fm.Sequential(
        fm.Dispatch(EXPERTS, expert_parallel=ep),
        fm.Quantize("fp8_block", weight="fp8_block"),
        fm.GroupedLinear(in_features=128, out_features=256, **here),
        fm.Quantize(backward=result),
        fm.SwiGLU(),
        *([fm.Scale("probs")] if scale else []),
        fm.Quantize(forward, weight="fp8_block"),
        fm.GroupedLinear(in_features=128, out_features=128, **here),
        fm.Quantize(backward=grad),
        fm.Combine(weights, expert_parallel=ep),
    )


@on_each
def plans_of_arriving_gradients(ep, folder, cases):
    """For each case, whether the rule is used, and why not. A case has options of `chain_of`, settings of the ranks,
    and the most ranks.
    """
    hopper.stand_ins()
    from fusedmoe.builtin_rules.exchange import beside

    found, most = [], beside.MOST_RANKS
    for options, settings, most_ranks in cases:
        beside.MOST_RANKS = most_ranks
        with hopper.on_cpus(folder), fm.recipe("bf16"), fm.disabled(*FP8_OTHERS):
            chain = chain_of(fm.ExpertParallel(ep.group, "symmetric", **CODES | settings), **options)
            index, weight = torch.zeros(40, 2, dtype=torch.int64), torch.zeros(40, 2, requires_grad=True)
            x = torch.zeros(40, 128, dtype=torch.bfloat16, requires_grad=True)
            explained = chain.explain(x, expert_index=index, expert_weight=weight)
        attempts = [a for plan in explained.plans for a in plan.attempts if a.rule == ARRIVING_GRADIENTS]
        found.append((ARRIVING_GRADIENTS in {step.rule for step in explained.steps}, [a.reason for a in attempts]))
    beside.MOST_RANKS = most
    return found


ROTATED, SLOW_WIRE = Quantizer(fp8_block(), hadamard=True), {"combine_dtype": torch.float32}
ANY_SCALES = fp8_block(power_of_two=False)
PLANS = {
    "as codes travel": ({}, {}, 32, None),
    "without a row scale": ({"scale": False}, {}, 32, None),
    "gradients in E5M2": ({"grad": fp8_block(E5M2)}, {}, 32, "the product reads gradients as fp8 e5m2 1x128"),
    "scales of any size": ({"grad": ANY_SCALES}, {}, 32, "gradients have scales of any size"),
    "rotated gradients": ({"grad": ROTATED}, {}, 32, "no kernel rotates rows"),
    "a weight gradient in bf16": ({"grad": "fp8_block:wgrad=bf16"}, {}, 32, "wgrad.grad_output is not quantized"),
    "a rotated input": ({"forward": ROTATED}, {}, 32, "wgrad.input is rotated"),
    "a rotated result": ({"result": ROTATED}, {}, 32, "the gradient of the preactivation is rotated"),
    "weights in combine": ({"scale": False, "weights": "probs"}, {}, 32, "expected DCombine, got CombineWeightGrad"),
    "sums in fp32": ({}, SLOW_WIRE, 32, "the gradients are fp32"),
    "many ranks": ({}, {}, 1, "2 ranks: the kernel that divides rows"),
    "tokens in bf16": ({}, {"dispatch_dtype": None}, 32, "gradients travel in their own dtype"),
}


def test_plans_of_gradients_that_arrive_as_codes(hopper_ranks, folder):
    cases = [case[:3] for case in PLANS.values()]
    for found in hopper_ranks.run(plans_of_arriving_gradients, 2, MOST_TOKENS, folder, cases)[:2]:
        for (name, (*_, wanted)), (used, reasons) in zip(PLANS.items(), found, strict=True):
            assert used is (wanted is None), (name, reasons)
            assert used or any(wanted in reason for reason in reasons), (name, reasons)


@pytest.mark.parametrize("options", [{}, {"symmetric": True}], ids=str)
def test_gradients_travel_as_codes_under_bf16_too(hopper_ranks, folder, options):
    options = {"symmetric": (folder,)} if options else {}
    for used, *_ in hopper_ranks.run(compare, 2, CODES, UNEVEN, disabled=((),) * 4, **options)[:2]:
        assert GRADIENTS_AS_CODES in used


@on_each
def results_of_wires(ep, folder):
    """Results of tokens that travel in bf16, and as codes: by allgather, by "symmetric"."""
    hopper.stand_ins()
    with fm.recipe("fp8_block"), hopper.on_cpus(folder):
        made = [
            fm.ExpertParallel(ep.group, engine, max_tokens=MOST, dispatch_dtype=wire)
            for engine in ("allgather", "symmetric") for wire in (None, torch.float8_e4m3fn)
        ]  # fmt: skip
        layers = [hopper.layer(other, False, 128, 128) for other in made]
        return [hopper.trained(made, 40 + ep.rank, training=False)["y"] for made in layers]


def test_codes_that_travel_give_the_bits_of_tokens_quantized_after_arrival(hopper_ranks, folder):
    for want, *results in hopper_ranks.run(results_of_wires, 2, MOST_TOKENS, folder)[:2]:
        assert want.float().norm() > 0
        assert all(torch.equal(got, want) for got in results)
