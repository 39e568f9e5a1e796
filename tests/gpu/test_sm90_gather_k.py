"""Weight gradients whose rows are gathered: bit for bit those of the kernel without an index, on rows gathered before.

Both kernels multiply the same values in the same order, if they have the same tiles. Whatever may not be read is NaN:
tokens of other experts, rows after the last expert's, and the memory around the operands.

Axes: T tokens, R rows sorted by expert, E experts, N and K features of the gradient and of the input.
"""

import itertools
from dataclasses import dataclass

import pytest
import torch
from kit.hopper import DEVICE, needs_gpu, needs_hopper
from kit.poison import nan_in_new_tensors

from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.kernels.sm90 import products
from fusedmoe.kernels.sm90.tiles.choice import CANDIDATES, PP_192, PP_192_TALL, WGRADS

pytestmark = needs_hopper

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPERAND = {"grad_output": "a", "x": "b"}  # of the kernel
FIRST = {"grad_output": PP_192, "x": PP_192_TALL}
CONFIGS = [(name, config) for name, operand in OPERAND.items() for config in CANDIDATES[WGRADS[operand]]]
UNREADABLE = 2**30  # an index far outside of the tokens

of_either = pytest.mark.parametrize("gathered", OPERAND)
of_configs = pytest.mark.parametrize(("gathered", "config"), CONFIGS, ids=lambda value: getattr(value, "name", value))


@pytest.fixture(scope="module", autouse=True)
def built(build_ahead):
    from fusedmoe.kernels.sm90.gemm.operands import Plain
    from fusedmoe.kernels.sm90.gemm.ragged_k import RaggedK

    variants = [(config, OPERAND[gathered], "bf16", "bf16", False) for gathered, config in CONFIGS]
    variants += [
        (config, OPERAND[gathered], "bf16", out, True) for gathered, config in CONFIGS for out in ("fp32", "bf16")
    ]
    for gathered, config in FIRST.items():
        variants += [(config, OPERAND[gathered], dtype, "fp32", False) for dtype in ("bf16", "fp16")]
        variants.append((config, OPERAND[gathered], "fp16", "fp16", False))
    build_ahead(
        RaggedK(Plain(dtype), config, out=out, accumulate=add, gathered=operand)
        for config, gathered, dtype, out, add in variants
        for operand in (gathered, None)
    )


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def surrounded(t):
    """The same values, with NaN on all sides."""
    big = torch.full((t.shape[0] + 2, t.shape[1] + 16), torch.nan, dtype=t.dtype, device=t.device)
    inner = big[1:-1, 8:-8]
    inner.copy_(t)
    return inner


@dataclass
class Problem:
    """The operands of one weight gradient."""

    gathered: str  # "grad_output" or "x"
    splits: tuple[int, ...]
    tail: int = 37
    n: int = 200
    k: int = 136
    tokens: int = 150
    dtype: torch.dtype = BF16

    def __post_init__(self):
        used = sum(self.splits)
        widths = {"grad_output": self.n, "x": self.k}
        self.offsets = torch.tensor(list(itertools.accumulate(self.splits)), dtype=torch.int32, device=DEVICE)
        self.index = torch.randint(self.tokens, (used + self.tail,), dtype=torch.int32, device=DEVICE)
        self.index[used:] = UNREADABLE
        self.source = self.draw(self.tokens, widths[self.gathered])
        (other,) = widths.keys() - {self.gathered}
        rows = self.draw(used + self.tail, widths[other])
        rows[used:] = torch.nan
        self.rows = surrounded(rows)
        self.source = surrounded(self.source)
        self.before = torch.randn(len(self.splits), self.n, self.k, device=DEVICE)

    def draw(self, *shape):
        return torch.randn(shape, device=DEVICE).to(self.dtype)

    def operands(self, gathered_rows):
        return (gathered_rows, self.rows) if self.gathered == "grad_output" else (self.rows, gathered_rows)

    def run(self, options=DEFAULT, accumulate=False, source=None, **settings):
        """The weight gradient, with rows read through the index."""
        operands = self.operands(self.source if source is None else source)
        out = self.before.clone() if accumulate else None
        with nan_in_new_tensors():
            return products.grouped_wgrad(
                *operands, self.offsets, out=out, accumulate=accumulate, options=options, gather=self.index,
                gathered=self.gathered, **settings,
            )  # fmt: skip

    def want(self, accumulate=False, **settings):
        """The weight gradient of rows that are gathered first, by the kernel without an index."""
        used = sum(self.splits)
        gathered_rows = torch.full((used + self.tail, self.source.shape[1]), torch.nan, dtype=self.dtype, device=DEVICE)
        gathered_rows[:used] = self.source[self.index[:used].long()]
        out = self.before.clone() if accumulate else None
        with nan_in_new_tensors():
            return products.grouped_wgrad(
                *self.operands(gathered_rows), self.offsets, out=out, accumulate=accumulate, **settings
            )

    def check(self, options=DEFAULT, **settings):
        want = self.want(**settings)
        assert want.isfinite().all()
        assert want.any() or not sum(self.splits)
        assert torch.equal(self.run(options, **settings), want)


SPLITS = (130, 0, 61, 1, 0, 27)
RAGGED = {
    "around stages": ((1, 63, 64, 65, 0, 127, 128, 129, 2, 0, 62, 31, 32, 33, 0), 37),
    "no tail": ((100, 28, 0, 128, 256), 0),
    "all tail": ((0,) * 16, 50),
    "one row": ((1,), 0),
    "empty experts between": ((0,) * 40 + (3,) + (0,) * 40 + (70,) + (0,) * 20, 5),
    "one expert": ((300,), 3),
    "one takes all": ((0,) * 7 + (400,) + (0,) * 8, 5),
    "128 experts": (tuple(e * e % 11 for e in range(128)), 9),
}
LARGER = ((900, 0, 61, 1, 127, 1258, 0, 300), 200)


def test_is_the_product_of_the_gathered_rows(tiles):
    """Against fp64: the other tests compare with a kernel."""
    for gathered in OPERAND:
        tiles(FIRST[gathered])
        problem = Problem(gathered, SPLITS)
        used = sum(SPLITS)
        a, b = problem.operands(problem.source[problem.index[:used].long()])
        pairs = zip(a[:used].double().split(SPLITS), b[:used].double().split(SPLITS), strict=True)
        want = torch.stack([dy.T @ x for dy, x in pairs])
        error = (problem.run().double() - want).norm() / want.norm()
        assert error < 4e-3


@pytest.mark.parametrize("ragged", RAGGED)
@of_configs
def test_splits(gathered, config, ragged, tiles):
    tiles(config)
    splits, tail = RAGGED[ragged]
    Problem(gathered, splits, tail).check()


@pytest.mark.parametrize(
    ("n", "k"), [(8, 8), (8, 2056), (2056, 8), (72, 136), (136, 72), (64, 192), (192, 64), (264, 768), (768, 264)]
)
@of_configs
def test_widths(gathered, config, n, k, tiles):
    tiles(config)
    Problem(gathered, (130, 0, 61), 5, n, k).check()


@pytest.mark.parametrize(("dtype", "out"), [(BF16, FP32), (FP16, FP16), (FP16, FP32)], ids=str)
@of_either
def test_dtypes(gathered, dtype, out, tiles):
    tiles(FIRST[gathered])
    Problem(gathered, SPLITS, dtype=dtype).check(dtype=out)


@of_configs
def test_accumulates(gathered, config, tiles):
    tiles(config)
    problem = Problem(gathered, SPLITS)
    problem.check(accumulate=True)
    problem.check(options=KernelOptions(100, "static"), accumulate=True)


@of_configs
def test_adding_in_16_bits_has_the_bits_of_two_steps(gathered, config, tiles):
    tiles(config)
    problem = Problem(gathered, SPLITS)
    problem.before = problem.before.to(BF16)
    assert torch.equal(problem.run(accumulate=True), problem.before + problem.run())


@of_either
def test_accumulating_leaves_an_expert_without_rows_as_it_is(gathered, tiles):
    tiles(FIRST[gathered])
    problem = Problem(gathered, SPLITS)
    problem.before[1] = torch.nan
    after = problem.run(accumulate=True)
    empty = torch.tensor([count == 0 for count in SPLITS], device=DEVICE)
    assert torch.equal(after[empty].view(torch.int32), problem.before[empty].view(torch.int32))
    assert (after[~empty] != problem.before[~empty]).any((1, 2)).all()


@of_configs
def test_no_value_of_another_expert_is_read(gathered, config, tiles):
    """Tokens of all other experts are NaN: zero times NaN would show, wherever a stage has rows past the expert's."""
    tiles(config)
    splits = (64, 1, 65, 0, 63, 130)
    problem = Problem(gathered, splits, tokens=sum(splits))
    problem.index[: sum(splits)] = torch.randperm(sum(splits), dtype=torch.int32, device=DEVICE)
    want, ends = problem.want(), list(itertools.accumulate(splits))
    for expert, (end, count) in enumerate(zip(ends, splits, strict=True)):
        own = problem.index[end - count : end].long()
        source = torch.full_like(problem.source, torch.nan)
        source[own] = problem.source[own]
        assert torch.equal(problem.run(source=surrounded(source))[expert], want[expert])


@pytest.mark.parametrize("options", [KernelOptions(1000), KernelOptions(0, "static"), KernelOptions(120, "static")])
@of_configs
def test_options_change_no_bit(gathered, config, options, tiles):
    tiles(config)
    Problem(gathered, *LARGER, n=776, k=264, tokens=500).check(options)


@of_configs
def test_many_tiles_per_cta(gathered, config, tiles):
    """The ring goes around many times, with new tokens in each run: a stage that is read too early has old ones."""
    tiles(config)
    problem = Problem(gathered, (358, 18, 100, 361, 168, 176, 276, 320), 5, n=640, k=768, tokens=4000)
    used = sum(problem.splits)
    for _ in range(8):
        problem.index[:used] = torch.randint(problem.tokens, (used,), dtype=torch.int32, device=DEVICE)
        problem.source.copy_(problem.draw(*problem.source.shape))
        want = problem.want()
        for options in (DEFAULT, KernelOptions(124), KernelOptions(100, "static")):
            assert torch.equal(problem.run(options), want)


@of_configs
def test_repeated_runs_are_the_same_bit_for_bit(gathered, config, tiles):
    tiles(config)
    problem = Problem(gathered, (2100, 1900, 2048, 2300, 0, 1), n=1536, k=2048, tokens=3000)
    want = problem.want()
    for _ in range(10):
        assert torch.equal(problem.run(), want)


@of_either
def test_tokens_further_than_32_bits_reach(gathered, tiles):
    """The offset of the last token is more than 2^32 bytes."""
    tiles(FIRST[gathered])
    tokens, width = 40_000, 65_536
    problem = Problem(gathered, (70, 3), 0)
    narrow = problem.source.shape[1]
    wide = torch.empty(tokens, width, dtype=BF16, device=DEVICE)[:, :narrow]
    problem.index[:73] = torch.arange(tokens - 73, tokens, dtype=torch.int32, device=DEVICE)
    wide[-73:] = problem.draw(73, narrow)
    problem.source = wide
    problem.check()


@needs_gpu
@of_either
def test_in_a_cuda_graph_with_other_tokens_and_splits(gathered, tiles, no_sync):
    tiles(FIRST[gathered])
    problem = Problem(gathered, SPLITS)
    used, out = sum(SPLITS), torch.empty(len(SPLITS), problem.n, problem.k, dtype=BF16, device=DEVICE)

    def step():
        products.grouped_wgrad(
            *problem.operands(problem.source), problem.offsets, out=out, gather=problem.index, gathered=gathered
        )

    step()  # the kernel has to be loaded before it is captured
    with no_sync():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for splits in (SPLITS, (0, 100, 0, 0, 19, used - 119), (used, 0, 0, 0, 0, 0)):
        problem.splits = splits
        problem.offsets.copy_(torch.tensor(list(itertools.accumulate(splits)), dtype=torch.int32))
        problem.index[:used] = torch.randint(problem.tokens, (used,), dtype=torch.int32, device=DEVICE)
        graph.replay()
        assert torch.equal(out, problem.want())


@of_either
def test_without_rows(gathered):
    """Nothing is launched: zeros, or the gradient as it was."""
    problem = Problem(gathered, (0, 0), 0)
    assert not problem.run().any()
    assert torch.equal(problem.run(accumulate=True), problem.before)
