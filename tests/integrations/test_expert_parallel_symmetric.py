"""The engine "symmetric" on CPUs: what each rank writes where, and what it reads. GPU tests show that the work of
streams is in order.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from kit import hopper_ranks as hopper
from kit.expert_parallel_ranks import on_each

import fusedmoe as fm
from fusedmoe.expert_parallel import symmetric, torch_symmetric

pytestmark = pytest.mark.distributed


def symmetric_of(ep, max_tokens):
    return fm.ExpertParallel(ep.group, "symmetric", max_tokens=max_tokens)


@on_each
def exchanges(ep, folder):
    """Single exchanges: plain ones, lent results, and rooms, of which the next exchange may have none."""
    with hopper.on_cpus(folder):
        engine, others = symmetric_of(ep, 8).engine, ep.engine
        generator = torch.Generator().manual_seed(ep.rank)
        different, copied = [], 0
        for step in range(12):
            rows = step % 3 + 1
            ids = torch.randint(0, 9, (rows, 2), generator=generator, dtype=torch.int32)
            tokens = torch.randn(rows, 5, generator=generator)
            gathered = engine.start_gather([ids, tokens], rows, lend=step % 2 == ep.rank)  # only one of them lends
            got, want = [gathered.unfinished(0), *gathered.wait_all()], others.gather([ids, tokens], rows)
            different += [not torch.equal(a, b) for a, b in zip(got, [want[0], *want], strict=True)]
            gathered.give_back()
            parts, more = torch.randn(2 * rows, 5, generator=generator), torch.rand(2 * rows, 3, generator=generator)
            given = parts
            if step % 4 != ep.rank:
                given = engine.room([parts, more], parts.device)[0].copy_(parts)
                copied += 1
            if step % 5 == 4:  # another exchange first: the room is that of the next one no more
                given = parts
                engine.exchange([more])
            for a, b in zip(engine.exchange([given, more]), others.exchange([parts, more]), strict=True):
                different += [not torch.equal(x, y) for x, y in zip(a, b, strict=True)]
        return different, copied, engine.buffer_bytes()


def test_exchanges_are_those_of_allgather(hopper_ranks, folder):
    for different, copied, nbytes in hopper_ranks.run(exchanges, 2, 8, folder)[:2]:
        assert len(different) == 12 * 7
        assert not any(different)
        assert copied >= 8
        assert nbytes > 0


@on_each
def order_of_a_gather(ep, folder):
    """What the streams do in a gather that tells of its rows, and what a wait for its beginning waits for."""
    log = []

    def event(stream):
        number = sum(entry.startswith("event") for entry in log)
        log.append(f"event {number}")
        return SimpleNamespace(wait=lambda: log.append(f"wait for {number}"))

    def write(word, value):
        log.append(f"word {value}")
        word.fill_(value)

    barrier = hopper.FileBuffer.barrier

    def noted(self, timeout_s):
        log.append("barrier")
        barrier(self, timeout_s)

    with (
        hopper.on_cpus(folder),
        mock.patch.object(hopper.Stream, "record_event", event),
        mock.patch.object(symmetric, "write_word", write),
        mock.patch.object(hopper.FileBuffer, "barrier", noted),
        mock.patch.object(symmetric, "_read", lambda sources, parts, wanted: log.append(f"read {parts.dtype}")),
    ):
        engine = symmetric_of(ep, 4).engine
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


def test_a_kernel_that_waits_for_rows_waits_for_copies_alone(hopper_ranks, folder):
    """A product may wait on all SMs: after the event of `begun`, no barrier comes before the word."""
    started = [
        "word 0", "barrier", "event 0", "read torch.int32", "event 1", "read torch.float32", "word 1", "event 2",
        "barrier",
    ]  # fmt: skip
    assert hopper_ranks.run(order_of_a_gather, 2, None, folder)[:2] == [(started, ["wait for 0"], 1)] * 2


@on_each
def who_tells(ep, folder, gpu):
    with hopper.on_cpus(folder, gpu=gpu):
        engine = symmetric_of(ep, 4).engine
        told = [engine.tells(8)]
        engine.gather([torch.zeros(4, 8)], 4)
        return [*told, engine.tells(8), engine.tells(2)]


@pytest.mark.parametrize(("gpu", "tells"), [(None, True), ("the only one", False)])
def test_only_ranks_with_a_gpu_of_their_own_tell(hopper_ranks, folder, gpu, tells):
    """Else a copy inside a GPU, or a kernel that reads few rows, may wait for the SMs of a product that waits."""
    assert hopper_ranks.run(who_tells, 2, None, folder, gpu)[:2] == [[False, tells, False]] * 2


def test_views_of_a_buffer_that_inference_made_can_be_written():
    buffer = object.__new__(torch_symmetric.SymmetricBuffer)
    buffer._views, buffer._handle = {}, SimpleNamespace(get_buffer=lambda rank, shape, dtype, start: torch.zeros(shape))
    with torch.inference_mode():
        buffer.of_rank(0, 0, (4,), torch.float32)
    buffer.of_rank(0, 0, (4,), torch.float32).copy_(torch.ones(4))
    assert buffer.of_rank(0, 0, (4,), torch.float32).sum() == 4


@on_each
def error_while_reading(ep, folder):
    """An error between the barriers of an exchange on rank 0, and the exchange after it."""
    with hopper.on_cpus(folder):
        engine = symmetric_of(ep, 4).engine
        x = torch.full((4, 8), float(ep.rank))
        with contextlib.ExitStack() as stack:
            if ep.rank == 0:
                stack.enter_context(mock.patch.object(symmetric, "_read", side_effect=MemoryError))
                stack.enter_context(pytest.raises(MemoryError))
            engine.gather([x], 4)
        return engine.gather([x + 1], 4)[0].tolist()


def test_the_barriers_match_after_an_error_on_one_rank(hopper_ranks, folder):
    want = [[1.0] * 8] * 4 + [[2.0] * 8] * 4
    assert hopper_ranks.run(error_while_reading, 2, None, folder)[:2] == [want, want]


@on_each
def sizes_that_differ(ep, folder):
    with hopper.on_cpus(folder):
        made = hopper.layer(symmetric_of(ep, 8 + 8 * ep.rank))
        with pytest.raises(fm.InputError, match="expected the same max_tokens") as raised:
            made(torch.randn(4, hopper.HIDDEN).bfloat16())
        return str(raised.value)


def test_ranks_with_different_settings(hopper_ranks, folder):
    first, second = hopper_ranks.run(sizes_that_differ, 2, None, folder)[:2]
    assert first == second
    assert "bytes" in first
