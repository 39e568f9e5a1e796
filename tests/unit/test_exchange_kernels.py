"""The kernels of exchanges between GPUs, emulated: the ranks' regions are tensors of one process.

Launches of an emulated GPU run one after the other. So the words that a kernel waits for are there before its launch.
"""

import shutil
from collections import Counter

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl, which compiles the kernels")
pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi, as the kernels do")

from emulator import asynchronous, instructions
from emulator.barriers import EmulationError
from emulator.gpu import emulated
from kit.poison import nan_in_new_tensors
from kit.row_ranges import plain_blocks, tiles_of

from fusedmoe.kernels.exchange import functions
from fusedmoe.kernels.exchange.layout import (
    BEGIN,
    CONTROL_WORDS,
    COPY_WARPS,
    DONE,
    END,
    LISTED,
    NUMBER,
    READY,
    REPORT,
    SCATTER_WARPS,
    TELL,
)

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, which links the kernels' host code")

BF16, FP16 = torch.bfloat16, torch.float16
SMS = 2
EXPERTS_HERE = 2
TWICE = 32 * SMS * COPY_WARPS  # from this row on, a warp copies its second 32 rows
TWICE_SCATTERED = 32 * SMS * SCATTER_WARPS + 3  # tokens, of which a warp tells 32 at once
WIDE = 2048 + 8  # columns, of which a warp copies 2,048 at once


@pytest.fixture(autouse=True)
def few_ctas(monkeypatch):
    monkeypatch.setattr(functions, "SEND_CTAS", 2)
    monkeypatch.setattr(functions, "TOTAL_CTAS", 3)


class Ranks:
    """The regions of some ranks, of which all but the control words are NaN."""

    def __init__(self, gpu, ranks, nbytes, number):
        self.memory = torch.full((ranks, -(-nbytes // 16) * 4), -1, dtype=torch.int32)
        for memory in self.memory:
            memory[:CONTROL_WORDS] = 0
            memory[NUMBER] = number  # numbers may wrap
            memory[DONE : DONE + ranks] = number
            memory[READY : READY + ranks] = number
        gpu.others = [self.memory]
        self.peers = torch.tensor([m.data_ptr() for m in self.memory])
        self.of = [functions.Region(self.peers, m[:CONTROL_WORDS], r, 10**9) for r, m in enumerate(self.memory)]

    def arrived(self, number):
        """Let every rank find the data of the others there."""
        for memory in self.memory:
            memory[READY : READY + len(self.memory)] = number

    def at(self, rank, first, *shape, dtype=BF16):
        """A tensor in the region of a rank."""
        count = torch.Size(shape).numel() * dtype.itemsize
        return self.memory[rank].view(torch.uint8)[first : first + count].view(dtype).view(shape)


def routed(ranks, rows, chosen, columns=136, dtype=BF16, ids=None):
    generator = torch.Generator().manual_seed(0)
    counts = [rows - r % 2 for r in range(ranks)]
    x = [torch.randn(n, columns, generator=generator).to(dtype) for n in counts]
    most = ids or ranks * EXPERTS_HERE + 2
    index = [torch.randint(-1, most, (n, chosen), generator=generator) for n in counts]
    weight = [torch.rand(n, chosen, generator=generator) for n in counts]
    return counts, x, index, weight


@pytest.mark.parametrize(
    ("ranks", "rows", "chosen", "more", "number", "block"),
    [(2, 5, 3, {}, 0, 0), (3, 40, 2, {}, 2**31 - 1, 0), (2, 5, 3, {}, 2**31 - 1, 1), (3, 40, 2, {}, 0, 1),
     (2, TWICE + 40, 1, {"columns": WIDE, "dtype": FP16, "ids": 16}, 0, 0),
     (2, TWICE + 40, 1, {"columns": WIDE, "dtype": FP16, "ids": 16}, 0, 1), (3, 40, 2, {}, 0, 2)],
    ids=["two", "three, wraps", "two, wraps, by experts", "three, by experts", "many rows, wide, fp16",
         "many rows, wide, fp16, by experts", "by blocks of experts"],
)  # fmt: skip
def test_gather(ranks, rows, chosen, more, number, block):
    counts, x, index, weight = routed(ranks, rows, chosen, **more)
    columns = x[0].shape[1]
    at = functions.places([4 * rows * chosen, 4 * rows * chosen, 2 * rows * columns])
    after = number + 1 if number < 2**31 - 1 else -(2**31)
    with emulated() as gpu, nan_in_new_tensors():
        world = Ranks(gpu, ranks, at[1], number)
        world.arrived(after)
        for _ in range(2):  # in the first round, a rank gathers ids before later ranks have written theirs
            sent = []
            for r in range(ranks):
                send = functions.bind_send(x[r], index[r], weight[r], ranks, rows, EXPERTS_HERE)
                sent.append(send(world.of[r], x[r], index[r], weight[r]))
        for r, (got, ids, weights) in enumerate(sent):
            words = torch.zeros(EXPERTS_HERE // block if block else ranks, 5, dtype=torch.int32)
            pull = functions.bind_pull(got, ranks * rows, chosen, EXPERTS_HERE, at[0][2], SMS)
            assert world.memory[r][NUMBER] == number
            pull(world.of[r], got, ids, words, block)
            there = words if block else words[1:]
            assert there[:, -1].tolist() == [SMS * COPY_WARPS] * len(there)
            assert block or not words[0].any()
            assert not words[:, :-1].any()
            for q in range(ranks):
                ids_q, count = ids.view(ranks, rows, chosen)[q], counts[q]
                valid = (index[q] >= 0) & (index[q] < ranks * EXPERTS_HERE)
                want = torch.where(valid, index[q] - r * EXPERTS_HERE, -1)
                here = (want >= 0) & (want < EXPERTS_HERE)
                assert torch.equal(
                    torch.where((ids_q >= 0) & (ids_q < EXPERTS_HERE), ids_q, -1)[:count], torch.where(here, want, -1)
                )
                assert not ((ids_q[count:] >= 0) & (ids_q[count:] < EXPERTS_HERE)).any()
                assert torch.equal(weights.view(ranks, rows, chosen)[q][:count], weight[q])
                rows_q = got.view(ranks, rows, columns)[q][:count]
                wanted = here.any(1) if q != r else torch.ones(count, dtype=torch.bool)
                assert torch.equal(rows_q[wanted], x[q][wanted])
                assert rows_q[~wanted].isnan().all()  # nobody copies them
                assert wanted[TWICE:].any() if rows > TWICE else wanted.any()
    for memory in world.memory:
        assert memory[NUMBER] == after
        assert memory[DONE : DONE + ranks].tolist() == [after] * ranks
        assert not memory[NUMBER + 1 : CONTROL_WORDS].any()


@pytest.mark.parametrize(
    ("ranks", "rows", "chosen", "here", "block"),
    [(2, 300, 8, 32, 1), (3, 170, 4, 24, 3), (2, 2400, 2, 5, 1), (3, 40, 8, 64, 2), (32, 5, 2, 4, 1), (3, 90, 3, 8, 0)],
)
def test_rows_are_there_before_their_word(monkeypatch, ranks, rows, chosen, here, block):
    """When all warps have told a step, the rows of its experts or rank are there, and those of all steps before."""
    seen, state = [], {}
    red = instructions.TABLE["red."]

    def watched(code, opcode, operands):
        run = red(code, opcode, operands)
        return lambda warp: (run(warp), check())[0]

    def check():
        words, got, want, ok, ids, rank_of = state.values()
        there = words[:, -1] >= 0
        done = len(words) if there.all() else int((~there).int().argmax())
        if done > (seen[-1] if seen else 0):
            needed = (ok & (ids < done * block)).any(1) if block else ok.any(1) & (rank_of < done)
            assert torch.equal(got[needed], want[needed])
            seen.append(done)

    monkeypatch.setitem(instructions.TABLE, "red.", watched)
    generator = torch.Generator().manual_seed(ranks)
    x = [torch.randn(rows, 136, generator=generator).to(BF16) for _ in range(ranks)]
    index = [torch.randint(-3, ranks * here + 3, (rows, chosen), generator=generator) for _ in range(ranks)]
    for of_rank in index:
        of_rank[::3, -1] = of_rank[::3, 0]  # an expert twice
    weight = [torch.rand(rows, chosen, generator=generator) for _ in range(ranks)]
    at = functions.places([4 * rows * chosen, 4 * rows * chosen, 2 * rows * 136])
    with emulated() as gpu, nan_in_new_tensors():
        world = Ranks(gpu, ranks, at[1], 0)
        world.arrived(1)
        for _ in range(2):  # see `test_gather`
            sent = []
            for r in range(ranks):
                send = functions.bind_send(x[r], index[r], weight[r], ranks, rows, here)
                sent.append(send(world.of[r], x[r], index[r], weight[r]))
        got, ids, _ = sent[1]
        words = torch.full((-(-here // block) if block else ranks, 3), -SMS * COPY_WARPS, dtype=torch.int32)
        words[0, -1] *= block > 0
        ok, rank_of = (ids >= 0) & (ids < here), (torch.arange(ranks * rows) // rows - 1) % ranks
        state |= {"words": words, "got": got, "want": torch.cat(x), "ok": ok, "ids": ids, "rank": rank_of}
        pull = functions.bind_pull(got, ranks * rows, chosen, here, at[0][2], SMS)
        pull(world.of[1], got, ids, words, block)
    assert seen[-1] == len(words)
    assert not words[:, -1].any()


@pytest.mark.parametrize("block", [0, 1])
def test_the_warps_of_a_cta_share_each_step(monkeypatch, block):
    """A step waits for the slowest warp. Only some tokens have an expert here, more of them among the first ones."""
    ranks, rows, here = 3, 200, 2
    stored, store = Counter(), instructions.TABLE["st.global"]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, here, (ranks * rows, 1), generator=generator, dtype=torch.int32)
    chance = torch.linspace(0.8, 0.1, ranks * rows)[:, None]
    ids[torch.rand(ids.shape, generator=generator) > chance] = -1
    got, at = torch.zeros(ranks * rows, 256, dtype=BF16), CONTROL_WORDS * 4

    def watched(code, opcode, operands):
        run = store(code, opcode, operands)
        if ".v4" not in opcode:
            return run
        address = asynchronous.address_of(code, operands[0], "rd")

        def count(warp):
            row = (int(address(warp)[0]) - got.data_ptr()) // (2 * got.shape[1])
            stored[int(ids[row]) if block else row // rows, warp.cta.index[0], warp.index] += 1
            run(warp)

        return count

    with emulated() as gpu:
        world = Ranks(gpu, ranks, at + got.nbytes, 0)
        world.arrived(1)
        monkeypatch.setitem(instructions.TABLE, "st.global", watched)
        functions.bind_pull(got, ranks * rows, 1, here, at, SMS)(world.of[1], got, ids, None, block)
    assert sum(stored.values()) == (ids.view(ranks, rows)[[0, 2]] >= 0).sum()
    for step in {step for step, *_ in stored}:
        for cta in range(SMS):
            of_warps = [stored[step, cta, warp] for warp in range(COPY_WARPS)]
            assert min(of_warps) > 0
            assert max(of_warps) - min(of_warps) <= 1


def test_as_many_tokens_as_fit_a_list():
    ranks, here, at = 2, 2, CONTROL_WORDS * 4
    rows = SMS * LISTED
    assert functions.can_list(ranks * rows, ranks, SMS)
    assert not functions.can_list(ranks * (rows + 1), ranks, SMS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, here, (ranks * rows, 4), generator=generator, dtype=torch.int32)
    ids[torch.rand(len(ids), generator=generator) > 0.02] = -1
    ids[-1] = 0  # the last token of the list
    x = torch.randn(rows, 8, generator=generator).to(BF16)
    got = torch.full((ranks * rows, 8), torch.nan, dtype=BF16)
    with emulated() as gpu:
        world = Ranks(gpu, ranks, at + x.nbytes, 0)
        world.arrived(1)
        world.at(1, at, rows, 8)[:] = x
        functions.bind_pull(got, ranks * rows, 4, here, at, SMS)(world.of[0], got, ids, None, 1)
    wanted = (ids[rows:] >= 0).any(1)
    assert 1000 < wanted.sum() < 2000
    assert torch.equal(got[rows:][wanted], x[wanted])
    assert got[rows:][~wanted].isnan().all()
    assert got[:rows].isnan().all()


def test_a_gather_of_ids_needs_few_sms(monkeypatch):
    """Another kernel may keep SMs until other ranks come. So a rank tells the others although fewer CTAs are resident
    than there are: those that do not gather end before.
    """
    monkeypatch.setattr(functions, "SEND_CTAS", 10)  # the emulated GPU has room for 8
    monkeypatch.setattr(functions, "GATHER_CTAS", 2)
    ranks, rows, chosen = 2, 70, 80
    counts, x, index, weight = routed(ranks, rows, chosen)
    at = functions.places([4 * rows * chosen, 4 * rows * chosen, 2 * x[0].numel()])
    with emulated() as gpu, nan_in_new_tensors():
        world = Ranks(gpu, ranks, at[1], 0)
        world.memory[0][READY + 1] = 1  # the kernel of rank 0 runs first, and tells rank 1
        for r in range(ranks):
            send = functions.bind_send(x[r], index[r], weight[r], ranks, rows, EXPERTS_HERE)
            _, ids, weights = send(world.of[r], x[r], index[r], weight[r])
    valid = (index[0] >= 0) & (index[0] < ranks * EXPERTS_HERE)
    assert torch.equal(ids[: counts[0]], torch.where(valid, index[0], -1) - EXPERTS_HERE)
    assert torch.equal(weights[: counts[0]], weight[0])
    assert torch.equal(weights[rows:][: counts[1]], weight[1])


def coded(rows, columns, blocks, strided, seed):
    """Codes and scales, stored in either order."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.rand(rows, blocks, generator=generator)
    return codes, scale.T.contiguous().T if strided else scale


@pytest.mark.parametrize(
    ("ranks", "rows", "columns", "blocks", "strided", "with_ids"),
    [(2, 13, 272, 3, True, True), (3, 9, 128, 1, False, True), (2, 11, 640, 5, True, False),
     (2, TWICE + 3, 4096 + 16, 33, False, True)],
    ids=["strided", "three", "rows alone", "many rows, wide"],
)  # fmt: skip
def test_gather_of_codes(ranks, rows, columns, blocks, strided, with_ids):
    """Codes with their scales: both have the bits of their rank, and other memory stays as it is."""
    chosen = 2
    counts, _, index, weight = routed(ranks, rows, chosen)
    given = [coded(counts[r], columns, blocks, strided, r) for r in range(ranks)]
    width = functions.packed_width(*given[0])
    assert width % 32 == 0
    assert 0 <= width - columns - 4 * blocks < 32
    sizes = [4 * rows * chosen, 4 * rows * chosen] if with_ids else []
    at, nbytes = functions.places([*sizes, rows * width])
    with emulated() as gpu, nan_in_new_tensors():
        world = Ranks(gpu, ranks, nbytes, 6)
        world.arrived(7)
        for _ in range(2 if with_ids else 1):
            sent = []
            for r, (codes, scale) in enumerate(given):
                of_ids = (index[r], weight[r]) if with_ids else (None, None)
                send = functions.bind_send(codes, *of_ids, ranks, rows, EXPERTS_HERE, scale)
                sent.append(send(world.of[r], codes, *of_ids, scale))
        for r, (got, ids, _) in enumerate(sent):
            before = got.clone()
            if not with_ids:
                ids = torch.zeros(ranks * rows, chosen, dtype=torch.int32)
            words = torch.zeros(ranks, 3, dtype=torch.int32)
            functions.bind_pull(got, ranks * rows, chosen, EXPERTS_HERE, at[-1], SMS)(world.of[r], got, ids, words)
            assert words[1:, -1].tolist() == [SMS * COPY_WARPS] * (ranks - 1)
            codes, scale = functions.unpack(got, *given[r])
            wanted = ((ids >= 0) & (ids < EXPERTS_HERE)).any(1).view(ranks, rows)
            for q, count in enumerate(counts):
                there = wanted[q, :count] if q != r else torch.ones(count, dtype=torch.bool)
                rows_q = slice(q * rows, q * rows + count)
                assert torch.equal(codes[rows_q].view(torch.uint8)[there], given[q][0].view(torch.uint8)[there])
                assert torch.equal(scale[rows_q][there], given[q][1][there])
                assert torch.equal(got[rows_q][~there], before[rows_q][~there])
                assert there.any()


def test_packed_rows():
    codes, scale = coded(5, 48, 1, False, 0)
    rows = functions.pack(codes, scale)
    assert rows.shape == (5, 64)
    assert torch.equal(rows[:, :48], codes.view(torch.uint8))
    got_codes, got_scale = functions.unpack(rows, codes, scale)
    assert torch.equal(got_scale, scale)
    assert got_codes.dtype is codes.dtype
    assert torch.equal(got_codes.view(torch.uint8), codes.view(torch.uint8))
    assert functions.packs([scale, codes])
    for others in ([codes], [scale, codes[:, :40]], [scale.bfloat16(), codes], [codes, scale], [scale[0], codes]):
        assert not functions.packs(others)


@pytest.mark.parametrize(
    ("ranks", "each", "chosen", "columns", "packed"),
    [(2, 13, 2, 272, True), (3, 9, 4, 128, False), (2, TWICE_SCATTERED, 1, 16, True), (2, 11, 9, 4112, True)],
    ids=["packed", "three ranks", "many tokens", "many slots, wide"],
)  # fmt: skip
def test_scatter_of_codes(monkeypatch, ranks, each, chosen, columns, packed):
    """The rows of all slots, at once, and rank after rank, as they arrive; rows of no slot stay as they are."""
    monkeypatch.setattr(functions, "SCATTER_SMS", SMS)
    monkeypatch.setattr(functions, "SCATTER_CTAS", SMS)
    rank, every, blocks = 1, ranks * each, -(-columns // 128)
    codes, scale = coded(every, columns, blocks, False, 0)
    if packed:
        codes, scale = functions.unpack(functions.pack(codes, scale), codes, scale)
    generator = torch.Generator().manual_seed(0)
    room = every * chosen // 2
    row_of_slot = torch.randperm(every * chosen, generator=generator).clamp(max=room).view(every, chosen)
    token_of_row = torch.full((room,), -1)
    for token, rows in enumerate(row_of_slot.tolist()):
        for row in rows:
            if row < room:
                token_of_row[row] = token
    used = token_of_row >= 0
    used[-3:] = False
    row_of_slot[row_of_slot >= room - 3] = room
    step_of_row = (token_of_row // each - rank) % ranks

    def check(out, rows):
        for got, want in zip(out, (codes, scale), strict=True):
            assert got[~rows].float().isnan().all()
            got, want = (t.view(torch.uint8) if t.itemsize == 1 else t for t in (got, want))
            assert torch.equal(got[rows], want[token_of_row][rows])

    with emulated(), nan_in_new_tensors():
        scatter = functions.bind_scatter(codes, scale, row_of_slot, rank, ranks, room)
        check(scatter(codes, scale, row_of_slot), used)
        arrived, words = torch.zeros(ranks, 1, dtype=torch.int32), torch.zeros(ranks, 3, dtype=torch.int32)
        out = scatter(codes, scale, row_of_slot, None, arrived)
        check(out, used & (step_of_row == 0))
        assert not words.any()
        scatter(codes, scale, row_of_slot, out, arrived, words)
        check(out, used)
        assert words[1:, -1].tolist() == [SMS * SCATTER_WARPS] * (ranks - 1)
        assert not words[0].any()
        assert not words[:, :-1].any()


def test_gather_of_rows_alone():
    ranks, rows = 2, 9
    _, x, *_ = routed(ranks, rows, 2)
    at = functions.places([2 * rows * x[0].shape[1]])
    index = torch.zeros(ranks * rows, 2, dtype=torch.int32)
    with emulated() as gpu, nan_in_new_tensors():
        world = Ranks(gpu, ranks, at[1], 6)
        got = [functions.bind_send(x[r], None, None, ranks, rows, 2)(world.of[r], x[r])[0] for r in range(ranks)]
        for memory in world.memory:
            assert memory[READY : READY + ranks].tolist() == [7] * ranks
        for r in range(ranks):
            functions.bind_pull(got[r], ranks * rows, 2, 2, at[0][0], SMS)(world.of[r], got[r], index)
            assert all(torch.equal(got[r].view(ranks, rows, -1)[q][: len(x[q])], x[q]) for q in range(ranks))


def sums_of(rows, slots):
    """The sums over slots, in their order."""
    padded = torch.cat([rows, torch.zeros(1, rows.shape[1], dtype=rows.dtype)]).float()
    sums = torch.zeros(len(slots), rows.shape[1])
    for of_tokens in slots.T:
        sums += padded[of_tokens]
    return sums.to(rows.dtype)


@pytest.mark.parametrize(
    ("ranks", "valued", "rows", "columns", "dtype", "chosen"),
    [(2, False, 6, 264, BF16, 3), (2, True, 6, 264, BF16, 3), (3, False, 6, 264, BF16, 3), (3, True, 6, 264, BF16, 3),
     (2, True, TWICE + 9, WIDE, FP16, 3), (6, True, 6, 264, BF16, 8)],
)  # fmt: skip
@pytest.mark.parametrize("of_rows", [False, True])
def test_return(ranks, valued, rows, columns, dtype, chosen, of_rows):
    """``of_rows``: whether one kernel sums the rows and stores the sums. `Total` takes four rows and ranks at once."""
    tokens, total = 5, 20
    generator = torch.Generator().manual_seed(ranks)
    given = [torch.randn(total, columns, generator=generator).to(dtype) for _ in range(ranks)]
    values = [torch.randn(total, generator=generator) if valued else None for _ in range(ranks)]
    slots = [
        torch.randint(0, total + 9, (ranks * rows, chosen), generator=generator).clamp(max=total) for _ in range(ranks)
    ]
    at = functions.places([2 * ranks * rows * columns, 4 * ranks * rows * chosen])
    at_parts, at_values = at[0]

    def part(r, q):
        """The sums of rank r for the tokens of rank q."""
        return sums_of(given[r], slots[r].view(ranks, rows, chosen)[q])

    with emulated() as gpu, nan_in_new_tensors():
        world = Ranks(gpu, ranks, at[1], -1)
        for r in range(ranks):
            if of_rows:
                push = functions.bind_push_sums(given[r], slots[r], values[r], at_parts, at_values, SMS)
                push(world.of[r], given[r], slots[r], values[r])
                continue
            sums = torch.cat(
                [part(r, q) if q != r else torch.full((rows, columns), torch.nan, dtype=dtype) for q in range(ranks)]
            )
            push = functions.bind_push(sums, slots[r], values[r], at_parts, at_values, SMS)
            for begin, end in [(0 if valued else 1, 2), (2, ranks)]:
                if begin < end:
                    push(world.of[r], sums, values[r], slots[r], begin, end)
        for q in range(ranks):
            others = [0] * ranks
            if not valued:
                others[q] = -1  # a rank tells itself nothing
            assert world.memory[q][READY : READY + ranks].tolist() == others
            of_slots = torch.float32 if valued else None
            total_of = functions.bind_total(given[q], tokens, chosen, of_slots, rows, at_parts, at_values)
            y, of_values = total_of(world.of[q], given[q], slots[q].view(ranks, rows, chosen)[q])
            want = torch.zeros(tokens, columns)
            for r in range(ranks):
                want += part(r, q)[:tokens].float()
            assert torch.equal(y, want.to(dtype))
            assert y.float().norm() > 1
            if valued:
                padded = [torch.cat([v, torch.zeros(1)]) for v in values]
                of_slots = [padded[r][slots[r].view(ranks, rows, chosen)[q, :tokens]] for r in range(ranks)]
                assert torch.equal(of_values, sum(of_slots[1:], of_slots[0]))
    for memory in world.memory:
        assert memory[NUMBER] == 0
        assert memory[DONE : DONE + ranks].tolist() == [0] * ranks
        assert not memory[NUMBER + 1 : CONTROL_WORDS].any()


TILE = 128  # rows of the product's tiles


def leaving_blocks(ranks, total, tiles_n):
    """Blocks of an expert without rows, of others, and of rows of no expert; the tiles of all but the last are done."""
    first = torch.randint(0, total, (ranks, 40))
    end = first + torch.randint(0, 300, first.shape)
    first[:, 3] = end[:, 3] = 0
    counts = 2 * tiles_n * (-(-(end - first) // TILE)).sum(1, keepdim=True)
    counts[-1] = 0
    return torch.cat([first, end, counts, torch.zeros_like(counts)], 1).to(torch.int32)


@pytest.mark.parametrize(
    ("ranks", "chosen", "rows", "columns", "missing"),
    [(2, 2, 19, 520, 9), (3, 5, 19, 520, 80), (4, 8, 19, 520, 0), (2, 32, 40, WIDE, 160), (2, 4, 70, 64, 80)],
)
def test_a_return_beside_a_product(ranks, chosen, rows, columns, missing):
    """After the product, all of whose tiles are counted, except those of the own rows."""
    total, tiles_n = 40, 3
    torch.manual_seed(ranks)
    at, nbytes = functions.places([2 * ranks * rows * columns])
    with emulated() as gpu, nan_in_new_tensors():
        world = Ranks(gpu, ranks, nbytes, 4)
        for r in range(ranks):
            given = torch.randn(total, columns).to(BF16)
            slots = torch.randint(0, total + missing, (ranks * rows, chosen)).clamp(max=total)
            slots[5] = total  # a token without rows
            blocks = leaving_blocks(ranks, total, tiles_n).flatten()
            push = functions.bind_push_sums(given, slots, None, at[0], at[0], SMS, (TILE, tiles_n))
            push(world.of[r], given, slots, None, blocks)
            for q in range(ranks):
                got = world.at(q, at[0], ranks, rows, columns)[r]
                if q == r:
                    assert got.isnan().all()
                    continue
                assert torch.equal(got, sums_of(given, slots.view(ranks, rows, chosen)[q]))
                assert got.float().norm() > 1
    for q, memory in enumerate(world.memory):
        assert memory[READY : READY + ranks].tolist() == [4 if r == q else 5 for r in range(ranks)]
        assert not memory[NUMBER + 1 : CONTROL_WORDS].any()


@pytest.mark.parametrize("reports", [True, False])
def test_rows_that_are_never_there(reports):
    """A rank that waits for its own product, of which a tile is missing, reports itself if there is an address."""
    ranks, rows, total = 3, 4, 8
    given, slots = torch.randn(total, 64).to(BF16), torch.randint(0, total, (ranks * rows, 2))
    at, nbytes = functions.places([2 * ranks * rows * 64])
    blocks, report = leaving_blocks(ranks, total, 2), torch.zeros(2, dtype=torch.int32)
    blocks[1, -2] -= 1
    with emulated() as gpu:
        world = Ranks(gpu, ranks, nbytes, 4)
        if reports:
            gpu.others.append(report)
            world.memory[1][REPORT : REPORT + 2].view(torch.int64).fill_(report.data_ptr())
        push = functions.bind_push_sums(given, slots, None, at[0], at[0], SMS, (TILE, 2))
        with pytest.raises(EmulationError, match="the kernel ends with an error"):
            push(world.of[1], given, slots, None, blocks.flatten())
        assert report.tolist() == ([2, 5] if reports else [0, 0])
        assert world.memory[0][READY + 1] == 5  # the rows of the first block have left
        assert world.memory[2][READY + 1] == 4


def sorted_by_expert(tokens, chosen, experts, others, room=None):
    """Random routing: the row of each slot, R if there is none, the experts' offsets, and the tokens of the R rows.
    Expert 1 has no rows.
    """
    index = torch.randint(0, experts + others, (tokens, chosen))
    index[index == 1] = experts
    order = index.flatten().clamp(max=experts).sort(stable=True)
    offsets = torch.searchsorted(order.values, torch.arange(experts), right=True).to(torch.int32)
    room = int(offsets[-1]) if room is None else room
    slots = order.indices.argsort().clamp(max=room).view(tokens, chosen)
    return slots, offsets.clamp(max=room), (order.indices // chosen)[:room]


@pytest.mark.parametrize(
    ("ranks", "rows", "chosen", "experts", "others", "columns", "room", "rank", "halves"),
    [(2, 300, 8, 32, 96, 136, None, 1, False), (3, 170, 4, 24, 40, 64, 400, 1, False),
     (4, 70, 8, 33, 99, 64, None, 1, False), (2, 260, 1, 64, 0, WIDE, None, 1, False),
     (32, 9, 32, 8, 300, 64, None, 1, False), (2, 300, 8, 32, 96, 136, None, 1, True),
     (4, 300, 8, 33, 99, 64, None, 1, True), (3, 400, 8, 8, 20, 64, 1700, 2, True),
     (4, 300, 8, 32, 8, 64, None, 3, True), (5, 60, 8, 5, 15, 64, None, 2, True)],
    ids=["an expert per block", "rows without room", "last block of one", "wide", "many ranks", "halves, two ranks",
         "halves, low", "halves, high, rows without room", "halves, high", "halves, five ranks"],
)  # fmt: skip
def test_sums_leave_when_the_blocks_of_their_experts_are_there(
    monkeypatch, ranks, rows, chosen, experts, others, columns, room, rank, halves
):  # fmt: skip
    """The rows of a block are NaN until its counter is complete; one block is complete after some reads of counters."""
    torch.manual_seed(ranks)
    tiles_n, half = 3, ranks // 2 * rows if halves else 0
    slots, offsets, token_of_row = sorted_by_expert(ranks * rows, chosen, experts, others, room)
    count = len(token_of_row)
    want = torch.randn(count, columns).to(BF16)
    blocks = plain_blocks(offsets, token_of_row, 0, own=(rank, rows) if halves else None, half=half)
    blocks = blocks.view(-1, 2 * (experts + 1) + 2)
    complete = 2 * tiles_n * tiles_of(blocks, TILE).to(torch.int32)
    given, left = torch.full_like(want, torch.nan), complete.nonzero().flatten().tolist()
    at, nbytes = functions.places([2 * ranks * rows * columns])
    state = {"reads": 0, "early": 0}
    load = instructions.TABLE["ld."]

    def watched(code, opcode, operands):
        run = load(code, opcode, operands)
        if "acquire.gpu" not in opcode:
            return run

        def read(warp):
            run(warp)
            state["reads"] += 1
            if left and state["reads"] % 40 == 0:
                block = left.pop(0)
                if not left:
                    of_others = [world.at(q, at[0], ranks, rows, columns)[rank] for q in range(ranks) if q != rank]
                    state["early"] = sum(int((~p.isnan()).all(1).sum()) for p in of_others)
                for first, end in blocks[block, :-2].view(2, -1).T.tolist():
                    given[first:end] = want[first:end]
                blocks[block, -2] = complete[block]

        return read

    monkeypatch.setitem(instructions.TABLE, "ld.", watched)
    with emulated() as gpu, nan_in_new_tensors():
        world = Ranks(gpu, ranks, nbytes, 4)
        push = functions.bind_push_sums(given, slots, None, at[0], at[0], SMS, (TILE, tiles_n), experts, half)
        push(world.of[rank], given, slots, None, blocks.flatten())
    assert not left
    of_rank = slots.view(ranks, rows, chosen)
    for q in range(ranks):
        got = world.at(q, at[0], ranks, rows, columns)[rank]
        assert torch.equal(got, sums_of(want, of_rank[q])) if q != rank else got.isnan().all()
        assert q == rank or got.float().norm() > 1
        assert world.memory[q][READY : READY + ranks].tolist() == [5 if r == rank != q else 4 for r in range(ranks)]
        assert not world.memory[q][NUMBER + 1 : CONTROL_WORDS].any()
    without_rows = (of_rank == count).all(2)[torch.arange(ranks) != rank]
    assert state["early"] > without_rows.sum()


def test_rows_of_an_expert_that_are_never_there():
    """A rank that waits for its own product reports itself."""
    ranks, rows, experts = 3, 40, 4
    slots, offsets, token_of_row = sorted_by_expert(ranks * rows, 2, experts, 4)
    count = len(token_of_row)
    given, blocks = torch.ones(count, 64, dtype=BF16), plain_blocks(offsets, token_of_row, 0)
    blocks, report = blocks.view(experts, -1), torch.zeros(2, dtype=torch.int32)
    blocks[:-1, -2] = 4 * tiles_of(blocks, TILE)[:-1]
    at, nbytes = functions.places([2 * ranks * rows * 64])
    with emulated() as gpu:
        world = Ranks(gpu, ranks, nbytes, 4)
        gpu.others.append(report)
        world.memory[1][REPORT : REPORT + 2].view(torch.int64).fill_(report.data_ptr())
        push = functions.bind_push_sums(given, slots, None, at[0], at[0], SMS, (TILE, 2), experts)
        with pytest.raises(EmulationError, match="the kernel ends with an error"):
            push(world.of[1], given, slots, None, blocks.flatten())
    assert report.tolist() == [2, 5]
    many = slots.new_empty(3 << 18, 2)
    push = functions.bind_push_sums(given, many, None, 0, 0, SMS, (TILE, 2), experts)
    with pytest.raises(ValueError, match=f"{1 << 19} rows of other ranks: expected at most {1 << 16}"):
        push(world.of[1], given, many, None, blocks)
    for values, tiles in ((None, None), (torch.ones(count), (TILE, 2))):
        with pytest.raises(ValueError, match="expected tiles of a product, and no values"):
            functions.bind_push_sums(given, slots, values, 0, 0, SMS, tiles, experts)


def test_signals():
    with emulated() as gpu:
        world = Ranks(gpu, 2, 4 * CONTROL_WORDS, 3)
        signal = functions.bind_signal(world.of[0])
        signal(world.of[0], BEGIN)
        world.arrived(4)
        world.memory[1][READY] = 3
        signal(world.of[0], TELL)
        assert world.memory[1][READY : READY + 2].tolist() == [4, 4]
        assert world.memory[0][NUMBER] == 3
        signal(world.of[0], END)
        assert world.memory[0][NUMBER] == 4
        assert world.memory[1][DONE : DONE + 2].tolist() == [4, 3]


def test_a_rank_that_does_not_come_is_reported():
    ids, report = torch.zeros(3, 1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    rows = torch.zeros(3, 8, dtype=BF16)
    at, nbytes = functions.places([2 * 8])
    with emulated() as gpu:
        world = Ranks(gpu, 3, nbytes, 6)
        world.memory[0][READY + 1] = 7  # rank 2 has written no data
        world.memory[0][REPORT : REPORT + 2] = torch.tensor([report.data_ptr()]).view(torch.int32)
        gpu.others.append(report)
        pull = functions.bind_pull(rows, 3, 1, EXPERTS_HERE, at[0], SMS)
        with pytest.raises(EmulationError, match="the kernel ends with an error"):
            pull(world.of[0]._replace(patience=10**6), rows, ids)
    assert report.tolist() == [2 + 1, 7]
    assert world.memory[0][NUMBER] == 6


@pytest.mark.parametrize(
    ("shape", "dtype", "ranks", "chosen", "message"),
    [((4, 16), torch.float32, 2, 2, "float32"), ((4, 12), BF16, 2, 2, "a multiple of 8"),
     ((4, 16), BF16, 33, 2, "33 ranks"), ((4, 16), BF16, 2, 33, "33 experts per token"), ((4, 16), BF16, 32, 32, None)],
)  # fmt: skip
def test_refusals(shape, dtype, ranks, chosen, message):
    reason = functions.why_not(torch.empty(shape, dtype=dtype), ranks, chosen)
    assert (reason is None) == (message is None)
    assert message is None or message in reason


@pytest.mark.parametrize(
    ("arch", "missing", "unusable", "message"),
    [(90, (), None, None), (103, (), None, None), (None, (), None, "cpu is no NVIDIA GPU"), (80, (), None, "is sm_80"),
     (100, ("nvidia-cutlass-dsl",), None, "nvidia-cutlass-dsl"), (90, (), "update the driver", "update the driver")],
)  # fmt: skip
def test_devices(arch, missing, unusable, message, monkeypatch):
    monkeypatch.setattr(functions, "arch_of", lambda device: arch)
    monkeypatch.setattr(functions.toolkit, "missing_packages", lambda: missing)
    monkeypatch.setattr(functions.toolkit, "why_unusable", lambda: unusable)
    reason = functions.why_not_on(torch.device("cpu"))
    assert (reason is None) == (message is None)
    assert message is None or message in reason
