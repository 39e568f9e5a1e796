"""The row kernels for Hopper: offsets against plain PyTorch, column sums against fp64, whatever surrounds the rows."""

import pytest
import torch
from kit.hopper import needs_gpu, needs_hopper
from kit.poison import nan_in_new_tensors

from fusedmoe.kernels.rows.move.functions import bind_zero_tail, column_sums, offsets_from_splits
from fusedmoe.numerics.expert_rows import offsets_from_splits as plain_offsets

pytestmark = needs_hopper

# of norms, per expert: half a unit in the last place
TOLERANCE = {
    torch.float32: 1e-5,
    torch.bfloat16: 4e-3,
    torch.float16: 5e-4,
}
HALF = (torch.bfloat16, torch.float16)


# ---------------------------------------------------------------------------------------------------------- offsets


def splits_like(kind, experts, dtype, device, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    draw = lambda low, high: torch.randint(low, high, (experts,), device=device, generator=generator)  # noqa: E731
    splits = {
        "random": lambda: draw(0, 100),
        "zero": lambda: draw(0, 1),
        "negative": lambda: draw(-100, 100),
        "all negative": lambda: draw(-(2**31), 0),
        "past the rows": lambda: draw(0, 10**6),
        "one has all": lambda: torch.zeros_like(draw(0, 1)).index_fill_(0, draw(0, experts)[:1], 3000),
    }[kind]()
    return splits.to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("experts", [1, 7, 31, 32, 33, 128, 512, 513, 1000, 4096])
@pytest.mark.parametrize("kind", ["random", "zero", "negative", "all negative", "past the rows", "one has all"])
def test_offsets_are_those_of_plain_pytorch(device, kind, experts, dtype):
    for seed, rows in enumerate((1, 3000, 262_144, 2**31 - 1)):
        splits = splits_like(kind, experts, dtype, device, seed)
        got = offsets_from_splits(splits, rows)
        assert got.dtype == torch.int32
        assert torch.equal(got, plain_offsets(splits, rows)), (kind, experts, rows)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", [5, 2**31 - 1])
@pytest.mark.parametrize("experts", [2, 33, 1000, 4096])
def test_offsets_of_splits_whose_sum_overflows(device, experts, rows, dtype):
    """Plain PyTorch's own sum overflows int64 here, hence Python's integers."""
    info = torch.iinfo(dtype)
    splits = torch.full((experts,), info.max, dtype=dtype, device=device)
    splits[0], splits[-1] = 3, info.min
    total, want = 0, []
    for split in splits.tolist():
        total += max(split, 0)
        want.append(min(total, rows))
    assert offsets_from_splits(splits, rows).tolist() == want


# ------------------------------------------------------------------------------------------------------ column sums


def rows_between_nan(rows, columns, dtype, device, used, seed=0):
    """Random rows, NaN after row ``used``, and NaN on all sides of the matrix."""
    generator = torch.Generator(device).manual_seed(seed)
    around = torch.full((rows + 8, columns + 16), torch.nan, dtype=dtype, device=device)
    grad = around[4 : 4 + rows, 8 : 8 + columns]
    grad[:used] = torch.randn(used, columns, device=device, generator=generator).to(dtype)
    return grad


def reference(grad, offsets):
    ends = offsets.tolist()
    return torch.stack([grad[a:b].double().sum(0) for a, b in zip([0, *ends], ends, strict=False)])


def check(grad, offsets, out=None):
    with nan_in_new_tensors():
        got = column_sums(grad, offsets, out)
    want = reference(grad, offsets)
    assert got.dtype == (out or grad.dtype)
    assert got.shape == want.shape
    error = (got.double() - want).norm(dim=1)
    assert (error <= TOLERANCE[got.dtype] * want.norm(dim=1)).all(), error / want.norm(dim=1)
    empty = offsets.diff(prepend=offsets.new_zeros(1)) == 0
    assert torch.equal(got[empty], torch.zeros_like(got[empty]))
    return got


SPLITS = {
    "even": [256] * 16,
    "ragged, some empty": [0, 1, 700, 0, 0, 33, 8, 2000, 7, 0, 9, 31, 32, 0, 65, 0],
    "one row": [0, 0, 1, 0],
    "all in one": [0, 0, 0, 4096, 0],
    "all in the only one": [4096],
    "nothing": [0, 0, 0],
    "one row per expert": [1] * 300,
    "many empty": [0] * 500 + [3, 0, 0, 5] + [0] * 500 + [1000],
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("columns", [8, 256, 768, 1408, 2880])
@pytest.mark.parametrize("kind", SPLITS)
def test_column_sums_are_those_of_fp64(device, kind, columns, dtype):
    splits = torch.tensor(SPLITS[kind], device=device)
    used = sum(SPLITS[kind])
    rows = used + 77
    offsets = offsets_from_splits(splits, rows)
    grad = rows_between_nan(rows, columns, dtype, device, used)
    for out in (None, torch.bfloat16, torch.float16, torch.float32):
        check(grad, offsets, out)


@pytest.mark.parametrize("dtype", HALF)
def test_a_row_alone_comes_out_as_it_is(device, dtype):
    grad = torch.randn(1, 264, device=device).to(dtype)
    offsets = torch.tensor([0, 1, 1], dtype=torch.int32, device=device)
    want = torch.cat([torch.zeros_like(grad), grad, torch.zeros_like(grad)])
    assert torch.equal(column_sums(grad, offsets), want)
    assert torch.equal(column_sums(grad, offsets, torch.float32), want.float())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (300, 264), (700, 2880)])
def test_the_tail_is_zeroed(device, rows, columns, dtype):
    """Other rows keep their bits, and so does the memory between rows."""
    for used in {0, 1, rows // 3, rows - 1, rows}:
        room = torch.full((rows, columns + 8), torch.nan, device=device, dtype=dtype)
        part, before = room[:, :columns], torch.randn(used, columns, device=device).to(dtype)
        part[:used] = before
        offsets = torch.tensor([used // 2, used], dtype=torch.int32, device=device)
        bind_zero_tail(part, offsets)(part, offsets)
        assert torch.equal(part[:used], before)
        assert not part[used:].any()
        assert room[:, columns:].isnan().all()


@pytest.mark.parametrize("experts", [1, 8, 128, 1000])
def test_random_boundaries(device, experts):
    """Experts that end anywhere in a slice, and slices that hold many of them; whole numbers, so the sums are exact."""
    generator = torch.Generator(device).manual_seed(experts)
    for rows in (1, 31, 32, 33, 5000, 40_000):
        grad = torch.randint(-4, 5, (rows, 520), device=device, generator=generator).to(torch.bfloat16)
        ends = torch.randint(0, rows + 1, (experts,), device=device, generator=generator).sort().values.int()
        grad[int(ends[-1]) :] = torch.nan
        assert torch.equal(column_sums(grad, ends, torch.float32).double(), reference(grad, ends)), (rows, experts)


def test_skew_at_full_size(device):
    rows, experts, columns = 262_144, 128, 1536
    for splits in (torch.full((experts,), rows // experts), torch.zeros(experts).index_fill_(0, torch.tensor(5), rows)):
        offsets = offsets_from_splits(splits.long().to(device), rows)
        check(rows_between_nan(rows, columns, torch.bfloat16, device, rows), offsets, torch.float32)


def test_more_than_two_to_the_31_elements(device):
    rows, columns = 2**18 + 5, 8200
    grad = torch.ones(rows, columns, dtype=torch.bfloat16, device=device)
    ends = torch.tensor([3, rows - 10, rows - 2], dtype=torch.int32, device=device)
    grad[rows - 2 :] = torch.nan
    want = torch.tensor([3.0, rows - 13, 8], device=device)
    assert torch.equal(column_sums(grad, ends, torch.float32), want[:, None].expand(-1, columns))


def test_the_same_bits_at_every_call(device):
    splits = torch.tensor([5, 0, 9000, 777, 1, 20_000], device=device)
    grad = rows_between_nan(30_000, 1408, torch.bfloat16, device, int(splits.sum()))
    first, *others = [column_sums(grad, offsets_from_splits(splits, 30_000), torch.float32) for _ in range(5)]
    assert first.isfinite().all()
    assert first[2].any()
    for other in others:
        assert torch.equal(first, other)


# ------------------------------------------------------------------------------------------------------------ async


@needs_gpu
def test_nothing_waits_for_the_device(device, no_sync):
    splits = torch.tensor([5, 0, 300], device=device)
    grad = rows_between_nan(400, 768, torch.bfloat16, device, 305)
    want = column_sums(grad, offsets_from_splits(splits, 400))  # compiles
    with no_sync():
        got = column_sums(grad, offsets_from_splits(splits, 400))
    assert torch.equal(got, want)


@needs_gpu
def test_a_graph_follows_the_splits(device):
    all_splits = [[5, 0, 300, 7], [0, 0, 0, 0], [400, 0, 0, 0], [0, 1, 0, 390], [1000, -3, 5, 7]]
    splits = torch.tensor(all_splits[0], device=device)
    grad = torch.randn(400, 768, device=device).to(torch.bfloat16)
    column_sums(grad, offsets_from_splits(splits, 400))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        offsets = offsets_from_splits(splits, 400)
        sums = column_sums(grad, offsets)
    for new in all_splits:
        splits.copy_(torch.tensor(new))
        graph.replay()
        assert torch.equal(offsets, plain_offsets(splits, 400))
        assert torch.equal(sums, column_sums(grad, offsets.clone()))
        assert ((sums.double() - reference(grad, offsets)).norm() <= 3e-3 * reference(grad, offsets).norm()).all()


@needs_gpu
def test_another_stream(device):
    """The kernels run on torch's current stream: they wait for what was queued there before."""
    grad = torch.zeros(4096, 768, dtype=torch.bfloat16, device=device)
    splits = torch.zeros(4, dtype=torch.int64, device=device)
    column_sums(grad, offsets_from_splits(splits, 4096))  # compiles
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        grad.fill_(1)
        splits.fill_(8)
        sums = column_sums(grad, offsets_from_splits(splits, 4096))
    stream.synchronize()
    assert torch.equal(sums, torch.full_like(sums, 8))
