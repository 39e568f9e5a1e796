"""The engine "symmetric" on CPUs, with stand-ins for its kernels: what each rank writes where, and what it reads."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from kit import hopper_ranks as hopper
from kit.expert_parallel_ranks import on_each

import fusedmoe as fm
from fusedmoe.expert_parallel import torch_symmetric
from fusedmoe.expert_parallel.engine import Wanted
from fusedmoe.kernels.exchange import functions
from fusedmoe.ops.exchange import fixed

pytestmark = pytest.mark.distributed


def symmetric_of(ep, max_tokens):
    return fm.ExpertParallel(ep.group, "symmetric", max_tokens=max_tokens)


@on_each
def exchanges(ep, folder):
    """Exchanges by the kernels and by copies, of which the ranks take either: with the results of "allgather"."""
    with hopper.on_cpus(folder):
        made, others, here = symmetric_of(ep, 8), ep.engine, 2
        engine = made.engine
        generator = torch.Generator().manual_seed(ep.rank)
        different = []
        for step in range(12):
            rows = step % 3 + 1
            count = rows if step % 2 else ep.rank % (rows + 1)
            dtype = torch.float32 if step % 4 == 3 else torch.bfloat16  # in fp32, no rank has kernels
            x = torch.randn(count, 8, generator=generator).to(dtype)
            index = torch.randint(-1, ep.ranks * here + 1, (count, 2), generator=generator)
            weight = torch.rand(count, 2, generator=generator)
            parts = torch.randn(ep.ranks * rows, 5, generator=generator)
            more = torch.rand(ep.ranks * rows, 3, generator=generator)
            by_copies = mock.patch.object(functions, "aligned", return_value=False)
            with by_copies if step % 5 == ep.rank else contextlib.nullcontext():
                got = engine.start_gather_of_tokens([x], index, weight, rows, here).wait_all()
                gradients = engine.gather([x], rows, Wanted(got[0], here))
                exchanged = engine.exchange([parts, more])
            want = others.start_gather_of_tokens([x], index, weight, rows, here).wait_all()
            ids = [torch.where((i >= 0) & (i < here), i, -1) for i in (got[0], want[0])]
            different.append(not torch.equal(*ids))
            counts = others.gather([torch.tensor([[count]])], 1)[0].flatten().tolist()
            for r, n in enumerate(counts):
                there = slice(r * rows, r * rows + n)
                wanted = (ids[1][there] >= 0).any(1)
                different.append(not torch.equal(got[1][there], want[1][there]))
                for of_rows in (got[2], *gradients):
                    different.append(not torch.equal(of_rows[there][wanted], want[2][there][wanted]))
            for a, b in zip(exchanged, others.exchange([parts, more]), strict=True):
                different += [not torch.equal(x, y) for x, y in zip(a, b, strict=True)]
            sent = torch.randn(ep.ranks * rows, 8, generator=generator).to(dtype)
            for given in ([sent, more], [sent]):
                with by_copies if step % 5 == ep.rank else contextlib.nullcontext():
                    summed_here = fixed.summed(made, given, count)
                want_sums = fixed.summed(ep, given, count)
                different += [not torch.equal(x, y) for x, y in zip(summed_here, want_sums, strict=True)]
        return different, hopper.kernels_ran["send"], engine.buffer_bytes()


@pytest.mark.parametrize("ranks", [2, 4])
def test_exchanges_are_those_of_allgather(hopper_ranks, folder, ranks):
    for different, kernels, nbytes in hopper_ranks.run(exchanges, ranks, 8, folder)[:ranks]:
        assert len(different) == 12 * (1 + 3 * ranks + 2 * ranks + 3)
        assert not any(different)
        assert kernels > 0
        assert nbytes > 0


@on_each
def without_following(ep, folder):
    """Words of a gather that copies make, and of one that kernels make."""
    with hopper.on_cpus(folder):
        engine, index = symmetric_of(ep, 4).engine, torch.zeros(4, 2, dtype=torch.int64)
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.full((4, 8), ep.rank + 1.0, dtype=dtype)
            pending = engine.start_gather_of_tokens([x], index, torch.ones(4, 2), 4, 2)
            words = torch.full((ep.ranks, 3), -pending.arrivals)
            if pending.arrivals:
                pending.follow(words)
            found.append((pending.arrivals, words[1:, -1].tolist(), pending.wait(2)[:, 0].tolist()))
        return found


def test_words_tell_that_rows_have_arrived(hopper_ranks, folder):
    for rank, ((of_copies, _, copied), (of_kernels, words, pulled)) in enumerate(
        hopper_ranks.run(without_following, 2, None, folder)[:2]
    ):
        assert of_copies == 0
        assert of_kernels > 0
        assert words == [0]
        assert copied == [1.0] * 4 + [2.0] * 4
        # all tokens chose experts of rank 0, so rank 1 reads none of its rows
        assert pulled[4 * rank : 4 * rank + 4] == [rank + 1.0] * 4
        assert (pulled == copied) == (rank == 0)


def test_views_of_a_buffer_that_inference_made_can_be_written():
    buffer = object.__new__(torch_symmetric.SymmetricBuffer)
    buffer._views, buffer._handle = {}, SimpleNamespace(get_buffer=lambda rank, shape, dtype, start: torch.zeros(shape))
    with torch.inference_mode():
        buffer.of_rank(0, 0, (4,), torch.float32)
    buffer.of_rank(0, 0, (4,), torch.float32).copy_(torch.ones(4))
    assert buffer.of_rank(0, 0, (4,), torch.float32).sum() == 4


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


@on_each
def late(ep, folder):
    """The next exchange after a kernel has waited too long."""
    with hopper.on_cpus(folder):
        engine = symmetric_of(ep, 4).engine
        engine.gather([torch.zeros(4, 8)], 4)
        engine._report.copy_(torch.tensor([2, 7]))
        with pytest.raises(RuntimeError) as raised:
            engine.gather([torch.zeros(4, 8)], 4)
        engine._report.zero_()
        return str(raised.value)


def test_an_error_of_the_gpu_names_the_rank_that_does_not_come(hopper_ranks, folder):
    for rank, message in enumerate(hopper_ranks.run(late, 2, None, folder)[:2]):
        assert f"rank {rank} of 2" in message
        assert "rank 1 did not come to exchange 7 within 600 s" in message
