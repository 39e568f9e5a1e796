"""The kernels for Hopper that sort slots by expert and move rows: against plain PyTorch and fp64, between NaN."""

import pytest
import torch
from kit.hopper import needs_gpu, needs_hopper
from kit.poison import nan_in_new_tensors

import fusedmoe as fm
from fusedmoe.kernels.rows.move.slot_functions import (
    bind_gather_rows,
    bind_route,
    bind_row_dots,
    bind_slot_values,
    bind_sum_slots,
)
from fusedmoe.numerics.expert_rows import sort_by_expert

pytestmark = needs_hopper

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}  # of norms, per row
HALF = (torch.bfloat16, torch.float16)


def ids(tokens, chosen, experts, device, kind="random", dtype=torch.int64, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    index = torch.randint(0, experts, (tokens, chosen), device=device, generator=generator)
    if kind == "sentinels":
        index[torch.rand(index.shape, device=device, generator=generator) < 0.3] = experts
        index[::7, 0] = -1
    elif kind == "one expert":
        index.fill_(experts - 1)
    elif kind == "only sentinels":
        index.fill_(experts)
    elif kind == "far out":
        index[::3] = torch.iinfo(dtype).max
        index[1::3, -1] = torch.iinfo(dtype).min
    return index.to(dtype)


KINDS = ("random", "sentinels", "one expert", "only sentinels", "far out")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("experts", [1, 31, 32, 33, 64, 65, 128, 256, 300, 512, 1024])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_are_sorted_as_by_plain_pytorch(device, kind, experts, dtype):
    # within one step, one warp, one chunk, at its end, over it, many chunks
    for tokens, chosen in ((1, 1), (1, 8), (5, 7), (256, 1), (256, 8), (257, 8), (1024, 2), (8192, 8), (3001, 3)):
        index = ids(tokens, chosen, experts, device, kind, dtype, seed=tokens)
        weight = torch.rand(tokens, chosen, device=device)
        with nan_in_new_tensors():
            got = bind_route(index, weight, experts)(index, weight)
        splits, probs, row_of_slot, slot_of_row, token_of_row, offsets = got
        want_slot, want_row, want_splits = sort_by_expert(index, experts)
        assert torch.equal(splits, want_splits), (tokens, chosen)
        assert torch.equal(offsets, want_splits.cumsum(0).int()), (tokens, chosen)
        assert torch.equal(row_of_slot, want_row), (tokens, chosen)
        assert torch.equal(slot_of_row, want_slot), (tokens, chosen)
        assert torch.equal(token_of_row, (want_slot // chosen).to(torch.int32)), (tokens, chosen)
        used = int(want_splits.sum())
        assert torch.equal(probs[:used], weight.flatten()[want_slot][:used])
        assert not probs[used:].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "chosen", "experts"), [(5, 7, 3), (300, 8, 64), (1500, 2, 33), (3001, 3, 128)])
def test_fewer_rows_than_slots(device, tokens, chosen, experts, kind):
    index = ids(tokens, chosen, experts, device, kind, seed=tokens)
    weight = torch.rand(tokens, chosen, device=device)
    slots, used = tokens * chosen, int(sort_by_expert(index, experts)[2].sum())
    for rows in {1, slots // 3, max(used - 1, 1), max(used, 1), min(used + 2, slots), slots - 1}:
        with nan_in_new_tensors():
            got = bind_route(index, weight, experts, num_rows=rows)(index, weight)
        splits, probs, row_of_slot, slot_of_row, token_of_row, offsets = got
        want_slot, want_row, want_splits = sort_by_expert(index, experts, rows)
        assert torch.equal(splits, want_splits), rows
        assert torch.equal(offsets, want_splits.cumsum(0).int()), rows
        assert torch.equal(row_of_slot, want_row), rows
        assert torch.equal(slot_of_row, want_slot), rows
        assert torch.equal(token_of_row, (want_slot // chosen).to(torch.int32)), rows
        filled = min(used, rows)
        assert torch.equal(probs[:filled], weight.flatten()[want_slot][:filled])
        assert not probs[filled:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_any_dtype(device, dtype):
    index = ids(300, 4, 16, device, "sentinels")
    weight = torch.rand(300, 4, device=device).to(dtype)
    _, probs, row_of_slot, *_ = bind_route(index, weight, 16)(index, weight)
    assert probs.dtype is dtype
    chosen = row_of_slot < 1200
    assert torch.equal(probs[row_of_slot[chosen]], weight[chosen])


def between_nan(rows, columns, dtype, device, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    around = torch.full((rows + 8, columns + 16), torch.nan, dtype=dtype, device=device)
    inner = around[4 : 4 + rows, 8 : 8 + columns]
    inner.copy_(torch.randn(rows, columns, device=device, generator=generator))
    return inner


def routed(tokens, chosen, experts, device, kind, seed=0):
    slot_of_row, row_of_slot, splits = sort_by_expert(ids(tokens, chosen, experts, device, kind, seed=seed), experts)
    return slot_of_row, row_of_slot, int(splits.sum())


def close(got, want):
    assert got.shape == want.shape
    error, size = (got.double() - want).norm(dim=-1), want.norm(dim=-1)
    assert (error <= TOLERANCE[got.dtype] * size + 1e-30).all(), (error / size).max()
    assert want.abs().sum() > 0


@pytest.mark.parametrize("scale", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [8, 248, 1024, 1032, 2880, 7168])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", ["random", "sentinels"])
def test_rows_are_gathered_scaled_and_summed(device, kind, dtype, columns, scale):
    # slots of a token: every way to sum them, and more than a warp has lanes
    for tokens, chosen in ((1, 1), (3, 8), (129, 9), (500, 2), (77, 3), (300, 4), (64, 17), (40, 33), (5, 70)):
        slot_of_row, row_of_slot, used = routed(tokens, chosen, 13, device, kind, seed=tokens)
        rows = tokens * chosen
        source, factors = between_nan(tokens, columns, dtype, device), torch.ones(rows, device=device).double()
        weight = None
        if scale is not None:
            weight = (0.1 + torch.rand(rows, device=device)).to(scale)
            weight[used:] = torch.nan
            factors = weight.double()
        with nan_in_new_tensors():
            got = bind_gather_rows(source, row_of_slot, weight)(source, row_of_slot, slot_of_row, weight)
        if used:
            close(got[:used], source.double()[slot_of_row[:used] // chosen] * factors[:used, None])
        assert not got[used:].any()

        sorted_rows = between_nan(rows, columns, dtype, device, seed=1)
        sorted_rows[used:] = torch.nan
        with nan_in_new_tensors():
            total = bind_sum_slots(sorted_rows, row_of_slot, weight)(sorted_rows, row_of_slot, weight)
        clean = torch.where(torch.arange(rows + 1, device=device)[:, None] < used, 1.0, 0.0).double()
        padded = torch.cat(
            [sorted_rows[:used].double() * factors[:used, None], clean.new_zeros(rows + 1 - used, columns)]
        )
        want = padded[row_of_slot].sum(1)
        assert total.shape == want.shape
        size = padded.abs()[row_of_slot].sum(1).norm(dim=-1)  # sums may cancel
        assert ((total.double() - want).norm(dim=-1) <= TOLERANCE[dtype] * size + 1e-30).all()


@pytest.mark.parametrize(("kind", "scale"), [("only sentinels", torch.float32), ("far out", torch.float16)])
def test_rows_of_tokens_that_chose_no_expert(device, kind, scale):
    test_rows_are_gathered_scaled_and_summed(device, kind, torch.bfloat16, 1032, scale)


def test_rows_beyond_32_bits_of_elements(device):
    tokens, chosen, columns = 70_000, 8, 4096  # 2.3e9 elements
    slot_of_row, row_of_slot, used = routed(tokens, chosen, 64, device, "random")
    source = torch.randn(tokens, columns, device=device, dtype=torch.bfloat16)
    rows = bind_gather_rows(source, row_of_slot, None)(source, row_of_slot, slot_of_row)
    assert used == len(rows)
    for part in (slice(0, 1000), slice(used - 1000, used)):
        assert torch.equal(rows[part], source[slot_of_row[part] // chosen])
    total = bind_sum_slots(rows, row_of_slot, None)(rows, row_of_slot)
    assert torch.equal(total, source * chosen)
    dots = bind_row_dots(source, rows, row_of_slot, torch.float32)(source, rows, row_of_slot, slot_of_row)
    want = source.float().square().sum(1)[slot_of_row // chosen]
    assert (dots - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [8, 256, 1032, 2880, 7168])
@pytest.mark.parametrize("kind", ["random", "sentinels"])
def test_row_dots(device, kind, columns, out):
    for tokens, chosen in ((1, 1), (129, 9), (500, 2)):
        slot_of_row, row_of_slot, used = routed(tokens, chosen, 13, device, kind, seed=tokens)
        rows = between_nan(tokens * chosen, columns, torch.bfloat16, device, seed=1)
        rows[used:] = torch.nan
        source = between_nan(tokens, columns, torch.bfloat16, device)
        with nan_in_new_tensors():
            got = bind_row_dots(source, rows, row_of_slot, out)(source, rows, row_of_slot, slot_of_row)
        assert got.dtype is out
        products = source.double()[slot_of_row[:used] // chosen] * rows[:used].double()
        error = (got[:used].double() - products.sum(1)).abs()
        assert (error <= TOLERANCE[out] * products.abs().sum(1) + 1e-30).all()
        assert not got[used:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["random", "sentinels", "only sentinels"])
def test_values_of_slots(device, kind, dtype):
    for tokens, chosen in ((1, 1), (129, 9), (8192, 8)):
        _, row_of_slot, used = routed(tokens, chosen, 13, device, kind, seed=tokens)
        values = torch.randn(tokens * chosen, device=device).to(dtype)
        values[used:] = torch.nan
        with nan_in_new_tensors():
            got = bind_slot_values(values, row_of_slot)(values, row_of_slot)
        padded = torch.cat([values, values.new_zeros(1)])
        assert torch.equal(got, padded[row_of_slot])


@pytest.mark.parametrize("scale", [None, torch.float32])
@pytest.mark.parametrize("kind", ["random", "sentinels"])
def test_kernels_of_fewer_rows_than_slots(device, kind, scale):
    columns = 264
    for tokens, chosen, sms in ((3, 8, 0), (129, 9, 0), (200, 2, 2), (77, 4, 0), (77, 4, 2)):
        index = ids(tokens, chosen, 13, device, kind, seed=tokens)
        all_used = int(sort_by_expert(index, 13)[2].sum())
        for count in {1, all_used // 2, all_used - 1, min(all_used + 1, tokens * chosen)}:
            slot_of_row, row_of_slot, splits = sort_by_expert(index, 13, count)
            used, token_of_row = int(splits.sum()), slot_of_row // chosen
            source, weight = between_nan(tokens, columns, torch.bfloat16, device), None
            rows = between_nan(count, columns, torch.bfloat16, device, seed=1)
            rows[used:] = torch.nan
            if scale is not None:
                weight = (0.1 + torch.rand(count, device=device)).to(scale)
                weight[used:] = torch.nan
            factors = torch.ones(count, device=device).double() if weight is None else weight.double()
            with nan_in_new_tensors():
                gathered = bind_gather_rows(source, row_of_slot, weight, count)(
                    source, row_of_slot, slot_of_row, weight
                )
                total = bind_sum_slots(rows, row_of_slot, weight, None, sms)(rows, row_of_slot, weight)
                dots = bind_row_dots(source, rows, row_of_slot, torch.float32)(source, rows, row_of_slot, slot_of_row)
                values = bind_slot_values(dots, row_of_slot)(dots, row_of_slot)
            assert len(gathered) == count
            close(gathered[:used], source.double()[token_of_row[:used]] * factors[:used, None])
            assert not gathered[used:].any()

            padded = torch.zeros(count + 1, columns, device=device).double()
            padded[:used] = rows[:used].double() * factors[:used, None]
            size = padded.abs()[row_of_slot].sum(1).norm(dim=-1)
            error = (total.double() - padded[row_of_slot].sum(1)).norm(dim=-1)
            assert (error <= TOLERANCE[torch.bfloat16] * size + 1e-30).all()

            products = source.double()[token_of_row[:used]] * rows[:used].double()
            assert ((dots[:used] - products.sum(1)).abs() <= 1e-5 * products.abs().sum(1)).all()
            assert not dots[used:].any()
            assert torch.equal(values, torch.cat([dots, dots.new_zeros(1)])[row_of_slot])


def layer(device, early, bias=False):
    torch.manual_seed(0)
    return fm.Sequential(
        fm.Dispatch(), fm.GroupedLinear(16, 256, 2 * 128, bias=bias), fm.SwiGLU(),
        *([fm.Scale("probs")] if early else []),
        fm.GroupedLinear(16, 128, 256, bias=bias), fm.Combine(None if early else "probs"),
    ).to(device, torch.bfloat16)  # fmt: skip


def call(module, index, weight, x, grad):
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    module.zero_grad()
    y = module(leaves[0], expert_index=index, expert_weight=leaves[1])
    y.backward(grad)
    return [y, *(t.grad for t in leaves), *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("kind", ["random", "sentinels", "one expert"])
@pytest.mark.parametrize(("early", "bias"), [(True, False), (False, False), (False, True)])
def test_the_whole_layer_is_as_exact_as_unfused(device, early, bias, kind):
    module = layer(device, early, bias)
    exact = layer(device, early, bias).double()
    exact.load_state_dict(module.state_dict())
    index = ids(700, 4, 16, device, kind)
    weight = torch.rand(700, 4, device=device)
    x, grad = (torch.randn(700, 256, device=device, dtype=torch.bfloat16) for _ in range(2))
    want = call(exact, index, weight.double(), x.double(), grad.double())
    with fm.strict():
        fused = call(module, index, weight, x, grad)
    rules = {step.rule for step in module.explain(x, expert_index=index, expert_weight=weight).plans[0].steps}
    assert {"sm90.dispatch", "sm90.combine"} <= rules
    with fm.disabled("*"):
        unfused = call(module, index, weight, x, grad)
    for a, b, c in zip(fused, unfused, want, strict=True):
        size = c.norm()
        assert size > 0
        assert (a.double() - c).norm() <= 1.5 * (b.double() - c).norm() + 1e-6 * size


@needs_gpu
def test_nothing_waits_and_bits_repeat(device, no_sync):
    module = layer(device, early=True)
    index, weight = ids(3000, 4, 16, device, "sentinels"), torch.rand(3000, 4, device=device)
    x, grad = (torch.randn(3000, 256, device=device, dtype=torch.bfloat16) for _ in range(2))
    first = [t.clone() for t in call(module, index, weight, x, grad)]
    with no_sync():
        again = call(module, index, weight, x, grad)
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)


@needs_gpu
def test_a_graph_follows_the_routing(device):
    module = layer(device, early=True).requires_grad_(False)
    index, weight = ids(600, 4, 16, device), torch.rand(600, 4, device=device)
    x = torch.randn(600, 256, device=device, dtype=torch.bfloat16)
    run = lambda: module(x, expert_index=index, expert_weight=weight)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for seed, kind in enumerate(KINDS):
        index.copy_(ids(600, 4, 16, device, kind, seed=seed))
        graph.replay()
        want = run()
        assert torch.equal(y, want), kind
        assert want.any() or kind == "only sentinels"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore")
def test_compiled_without_breaks_or_recompilation(device, backend):
    torch._dynamo.reset()
    module = layer(device, early=True)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    x, grad = (torch.randn(700, 256, device=device, dtype=torch.bfloat16) for _ in range(2))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(10):
            index = ids(700, 4, 16, device, KINDS[seed % 3], seed=seed)
            weight = torch.rand(700, 4, device=device)
            want = [t.clone() for t in call(module, index, weight, x, grad)]
            leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
            module.zero_grad()
            y = compiled(leaves[0], expert_index=index, expert_weight=leaves[1])
            y.backward(grad)
            for a, b in zip([y, *(t.grad for t in leaves), *(p.grad for p in module.parameters())], want, strict=True):
                assert torch.equal(a, b)
