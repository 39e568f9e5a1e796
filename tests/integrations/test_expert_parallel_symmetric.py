"""The engine "symmetric" on CPUs: processes share the memory of files, and the device's streams are no-ops.

This shows what each rank writes where, and what it reads. That the work of streams is in order, GPU tests show.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import distributed as dist

import fusedmoe as fm

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

from kit.two_ranks import Ranks
from test_expert_parallel_overlap import EXPERTS, HIDDEN, INTERMEDIATE, MOST, OVERLAPS, layer, stand_ins, trained

from fusedmoe.base.errors import InputError
from fusedmoe.expert_parallel import symmetric, torch_symmetric

OTHERS = {other for others in OVERLAPS.values() for other in others}


class FileBuffer:
    """The interface of `SymmetricBuffer`, in files that all processes map."""

    made = 0

    def __init__(self, nbytes, group, device):
        self.nbytes, self.group = nbytes, group
        name = f"{FileBuffer.folder}/buffer{FileBuffer.made}of"
        FileBuffer.made += 1
        with open(f"{name}{group.rank()}", "wb") as file:
            file.truncate(nbytes)
        dist.barrier(group)
        sizes = {"shared": True, "size": nbytes, "dtype": torch.uint8}
        self.memory = [torch.from_file(f"{name}{r}", **sizes) for r in range(group.size())]

    def of_rank(self, rank, offset, shape, dtype):
        count = torch.Size(shape).numel() * dtype.itemsize
        return self.memory[rank][offset : offset + count].view(dtype).view(shape)

    def barrier(self, timeout_s):
        dist.barrier(self.group)


class Stream:
    """Work is done when it is launched."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, other):
        pass

    def record_event(self):
        return SimpleNamespace(wait=lambda: None)


class Torch:
    """torch, with a stand-in for its streams."""

    cuda = SimpleNamespace(
        Stream=Stream, current_stream=Stream, stream=lambda stream: contextlib.nullcontext(),
        synchronize=lambda device: None, is_current_stream_capturing=lambda: False,
    )  # fmt: skip

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def on_cpus(folder, few=symmetric.FEW, gpu=None):
    """Let ``"symmetric"`` run on CPUs; the buffer that an exchange gets holds NaN.

    ``few``: the constant `FEW`. ``gpu``: one that all ranks share; by default each has its own.
    """
    FileBuffer.folder = folder
    next_buffer = symmetric.Symmetric._next_buffer

    def poisoned(self, nbytes, device):
        buffer = next_buffer(self, nbytes, device)
        buffer.memory[self.rank].fill_(0xFF)
        return buffer

    with (
        mock.patch.object(symmetric, "torch", Torch()),
        mock.patch.object(symmetric, "why_not", return_value=None),
        mock.patch.object(symmetric, "SymmetricBuffer", FileBuffer),
        mock.patch.object(symmetric, "write_word", torch.Tensor.fill_),
        mock.patch.object(symmetric, "gpu_id", return_value=gpu or f"of rank {dist.get_rank()}"),
        mock.patch.object(symmetric, "FEW", few),
        mock.patch.object(symmetric.Symmetric, "_next_buffer", poisoned),
    ):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("buffers"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    started = Ranks(tmp_path_factory.mktemp("symmetric"))
    yield started
    started.stop()


def layers(rank, folder, tokens, disabled, few=symmetric.FEW):
    """A layer by both engines, the latter with some rules disabled on each rank: the names that differ, the rules that
    overlap, and how many ranges of rows the launches of their products had.
    """
    kernels = stand_ins()
    with on_cpus(folder, few):
        exchanges = [fm.ExpertParallel(engine=name, max_tokens=MOST) for name in ("allgather", "symmetric")]
        with fm.disabled(*OVERLAPS):
            want = trained(layer(exchanges[0], rank, False, False), tokens[rank], rank)
        kernels.calls.clear()
        with fm.disabled(*disabled[rank]):
            for _ in range(2):  # the second layer finds the buffers of the first
                made = layer(exchanges[1], rank, False, False)
                got = trained(made, tokens[rank], rank)
            used = {step.rule for step in made.explain(torch.zeros(1, HIDDEN, dtype=torch.bfloat16)).steps}
    assert got.keys() == want.keys()
    assert len(got) > 3
    of_launches = {what["of_launch"] for name, what in kernels.calls if name == "ranges"}
    different = [name for name, value in want.items() if not torch.equal(got[name], value)]
    return different, used & OVERLAPS.keys(), of_launches


CASES = {
    "plain steps": (OVERLAPS, OVERLAPS),
    "overlaps": (OTHERS, OTHERS),
    "overlaps on one rank": (OTHERS, OVERLAPS),
    "overlaps on the other": (OVERLAPS, OTHERS),
}


# with two ranks and two chosen experts, a rank wants three quarters of the tokens
@pytest.mark.parametrize("few", [0.5, 0.8])
@pytest.mark.parametrize("tokens", [(50, 50), (37, 50), (0, 41)], ids=str)
@pytest.mark.parametrize("disabled", CASES.values(), ids=CASES)
def test_layers_have_the_bits_of_allgather(ranks, folder, tokens, disabled, few):
    for rank, (different, used, of_launches) in enumerate(ranks.run(layers, folder, tokens, disabled, few)):
        assert not different
        assert bool(used) == (disabled[rank] is OTHERS)
        rows_leave, rows_arrive = {1}, {3} if few < 0.75 else {1}
        assert of_launches == (rows_leave | rows_arrive if used else set())


def error_while_reading(rank, folder):
    """An error between the barriers of an exchange on rank 0, and the exchange after it."""
    with on_cpus(folder):
        engine = fm.ExpertParallel(engine="symmetric", max_tokens=4).engine
        x = torch.full((4, 8), float(rank))
        with contextlib.ExitStack() as stack:
            if rank == 0:
                stack.enter_context(mock.patch.object(symmetric, "_read", side_effect=MemoryError))
                stack.enter_context(pytest.raises(MemoryError))
            engine.gather([x], 4)
        return engine.gather([x + 1], 4)[0].tolist()


def test_the_barriers_match_after_an_error_on_one_rank(ranks, folder):
    want = [[1.0] * 8] * 4 + [[2.0] * 8] * 4
    assert ranks.run(error_while_reading, folder) == [want, want]


def test_four_ranks(tmp_path, folder):
    four = Ranks(tmp_path, 4)
    try:
        for different, used, _ in four.run(layers, f"{tmp_path}", (50, 37, 0, 44), (OTHERS, OVERLAPS, OTHERS, OTHERS)):
            assert not different
            assert used <= OVERLAPS.keys()
    finally:
        four.stop()


def exchanges(rank, folder):
    """Single exchanges: plain ones, lent results, and rooms, of which the next exchange may have none."""
    with on_cpus(folder):
        ep, others = (fm.ExpertParallel(engine=name, max_tokens=8).engine for name in ("symmetric", "allgather"))
        generator = torch.Generator().manual_seed(rank)
        different, copied = [], 0
        for step in range(12):
            rows = step % 3 + 1
            ids = torch.randint(0, 9, (rows, 2), generator=generator, dtype=torch.int32)
            tokens = torch.randn(rows, 5, generator=generator)
            gathered = ep.start_gather([ids, tokens], rows, lend=step % 2 == rank)  # only one of the ranks lends
            got, want = [gathered.unfinished(0), *gathered.wait_all()], others.gather([ids, tokens], rows)
            different += [not torch.equal(a, b) for a, b in zip(got, [want[0], *want], strict=True)]
            gathered.give_back()
            parts, more = torch.randn(2 * rows, 5, generator=generator), torch.rand(2 * rows, 3, generator=generator)
            given = parts
            if step % 4 != rank:
                given = ep.room([parts, more], parts.device)[0].copy_(parts)
                copied += 1
            if step % 5 == 4:  # another exchange first: the room is that of the next one no more
                given = parts
                ep.exchange([more])
            for a, b in zip(ep.exchange([given, more]), others.exchange([parts, more]), strict=True):
                different += [not torch.equal(x, y) for x, y in zip(a, b, strict=True)]
        return different, copied, ep.buffer_bytes()


def test_exchanges_are_those_of_allgather(ranks, folder):
    for different, copied, nbytes in ranks.run(exchanges, folder):
        assert len(different) == 12 * 7
        assert not any(different)
        assert copied >= 8
        assert nbytes > 0


def order_of_a_gather(rank, folder):
    """What the streams do in a gather that tells of its rows, and what a wait for its beginning waits for."""
    log = []

    def event(stream):
        number = sum(entry.startswith("event") for entry in log)
        log.append(f"event {number}")
        return SimpleNamespace(wait=lambda: log.append(f"wait for {number}"))

    def write(word, value):
        log.append(f"word {value}")
        word.fill_(value)

    barrier = FileBuffer.barrier

    def noted(self, timeout_s):
        log.append("barrier")
        barrier(self, timeout_s)

    with (
        on_cpus(folder),
        mock.patch.object(Stream, "record_event", event),
        mock.patch.object(symmetric, "write_word", write),
        mock.patch.object(FileBuffer, "barrier", noted),
        mock.patch.object(symmetric, "_read", lambda sources, parts, wanted: log.append(f"read {parts.dtype}")),
    ):
        engine = fm.ExpertParallel(engine="symmetric", max_tokens=4).engine
        engine.gather([torch.zeros(4, 99)], 4)  # a buffer that is large enough
        log.clear()
        ids, tokens, word = torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, 8), torch.full((1,), 7)
        pending = engine.start_gather([ids, tokens], 4, told=word)
        started = [*log]
        log.clear()
        pending.begun()
        begun = [*log]
        pending.wait_all()
        return started, begun, int(word)


def test_a_kernel_that_waits_for_rows_waits_for_copies_alone(ranks, folder):
    """A product may wait on all SMs: after the event of `begun`, no barrier comes before the word."""
    started = [
        "word 0", "barrier", "event 0", "read torch.int32", "event 1", "read torch.float32", "word 1", "event 2",
        "barrier",
    ]  # fmt: skip
    for got, begun, word in ranks.run(order_of_a_gather, folder):
        assert got == started
        assert begun == ["wait for 0"]
        assert word == 1


def who_tells(rank, folder, gpu):
    with on_cpus(folder, gpu=gpu):
        engine = fm.ExpertParallel(engine="symmetric", max_tokens=4).engine
        told = [engine.tells(8)]
        engine.gather([torch.zeros(4, 8)], 4)
        return [*told, engine.tells(8), engine.tells(2)]


@pytest.mark.parametrize(("gpu", "tells"), [(None, True), ("the only one", False)])
def test_only_ranks_with_a_gpu_of_their_own_tell(ranks, folder, gpu, tells):
    """Else a copy inside a GPU, or a kernel that reads few rows, may wait for the SMs of a product that waits."""
    assert ranks.run(who_tells, folder, gpu) == [[False, tells, False]] * 2


def test_views_of_a_buffer_that_inference_made_can_be_written():
    buffer = object.__new__(torch_symmetric.SymmetricBuffer)
    buffer._views, buffer._handle = {}, SimpleNamespace(get_buffer=lambda rank, shape, dtype, start: torch.zeros(shape))
    with torch.inference_mode():
        buffer.of_rank(0, 0, (4,), torch.float32)
    buffer.of_rank(0, 0, (4,), torch.float32).copy_(torch.ones(4))
    assert buffer.of_rank(0, 0, (4,), torch.float32).sum() == 4


def sizes_that_differ(rank, folder):
    with on_cpus(folder):
        ep = fm.ExpertParallel(engine="symmetric", max_tokens=8 + 8 * rank)
        made = fm.MoE(HIDDEN, INTERMEDIATE, EXPERTS, 2, expert_parallel=ep)
        with pytest.raises(InputError, match="expected the same max_tokens") as raised:
            made(torch.randn(4, HIDDEN))
        return str(raised.value)


def test_ranks_with_different_settings(ranks, folder):
    first, second = ranks.run(sizes_that_differ, folder)
    assert first == second
    assert "bytes" in first
