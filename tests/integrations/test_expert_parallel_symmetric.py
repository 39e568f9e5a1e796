"""The engine "symmetric" on CPUs, with stand-ins for its kernels: what each rank writes where, and what it reads."""

from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from kit import hopper_ranks as hopper
from kit.expert_parallel_ranks import alone, on_each
from torch import distributed as dist

import fusedmoe as fm
from fusedmoe.expert_parallel import agreement, auto, symmetric, torch_symmetric
from fusedmoe.expert_parallel.engine import Wanted, collectives
from fusedmoe.expert_parallel.subgroup import _timeout, group_of, group_of_hosts
from fusedmoe.expert_parallel.wire import packed, unpacked
from fusedmoe.kernels.exchange import functions, layout
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
            with by_copies if step % 5 == ep.rank else nullcontext():
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
                with by_copies if step % 5 == ep.rank else nullcontext():
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
def long_time_out(ep, folder):
    with hopper.on_cpus(folder):
        assert fm.ExpertParallel(ep.group, "symmetric", timeout_s=3600).timeout_s == 3600
        with pytest.raises(fm.InputError, match=r"timeout_s: expected at most 3600 with engine 'symmetric', got 3601"):
            fm.ExpertParallel(ep.group, "symmetric", timeout_s=3601)
    return fm.ExpertParallel(ep.group, "allgather", timeout_s=7200).timeout_s


def test_products_wait_longer_than_exchanges(hopper_ranks, folder):
    assert hopper_ranks.run(long_time_out, 2, None, folder)[:2] == [7200] * 2
    warps = pytest.importorskip("fusedmoe.kernels.device.warps", exc_type=ImportError)
    assert warps.MOST_READS * 130e-9 >= layout.MOST_TIMEOUT_S  # an H200 takes 164 ns for a read and nothing else


@on_each
def numbers_of_tokens(ep, folder):
    """The kernels that an engine keeps, of exchanges with many numbers of tokens; whether a sum was wrong."""
    with hopper.on_cpus(folder), mock.patch.object(symmetric, "MOST_KINDS", 3):
        made = symmetric_of(ep, 8)
        engine, wrong = made.engine, []
        for count in (1, 2, 3, 4, 5, 6, 7, 8, 3):
            parts = torch.full((ep.ranks * 8, 8), ep.rank + 1.0).bfloat16()
            (total,) = fixed.summed(made, [parts], count)
            wrong.append(total.tolist() != [[3.0] * 8] * count)
        return len(engine._sums), wrong


def test_an_engine_keeps_kernels_of_a_bounded_number_of_exchanges(hopper_ranks, folder):
    assert hopper_ranks.run(numbers_of_tokens, 2, 8, folder)[:2] == [(3, [False] * 9)] * 2


@on_each
def exchanges_of_codes(ep, folder):
    """Gathers of codes and scales, by the kernels and by copies, of which the ranks take either."""
    with hopper.on_cpus(folder):
        made, others, here, rows = symmetric_of(ep, 8), ep.engine, 2, 5
        engine = made.engine
        generator = torch.Generator().manual_seed(ep.rank)
        different, followed, before = [], [], hopper.kernels_ran["send codes"]
        for step, columns in enumerate((160, 256, 16, 160, 24)):  # codes of 24 columns do not travel in pairs
            count = (rows, 0, 3)[(step + ep.rank) % 3]
            x = torch.randn(count, columns, generator=generator).bfloat16()
            index = torch.randint(-1, ep.ranks * here + 1, (count, 2), generator=generator)
            weight = torch.rand(count, 2, generator=generator)
            tokens = packed(x, torch.float8_e4m3fn)
            assert len(tokens) == 2
            by_copies = step % 2 and step % 3 == ep.rank
            with mock.patch.object(functions, "aligned", return_value=False) if by_copies else nullcontext():
                pending = engine.start_gather_of_tokens(tokens, index, weight, rows, here)
                if pending.arrivals and step == 0:
                    words = torch.full((ep.ranks, 3), -pending.arrivals)
                    pending.follow(words)
                    followed.append(words[1:, -1].tolist())
                got = pending.wait_all()
                gradients = engine.gather(tokens, rows, Wanted(got[0], here))
                every = engine.gather(tokens, rows)
            want = others.start_gather_of_tokens(tokens, index, weight, rows, here).wait_all()
            counts = others.gather([torch.tensor([[count]])], 1)[0].flatten().tolist()
            assert [t.shape for t in (*got, *gradients, *every)] == [t.shape for t in (*want, *want[2:], *want[2:])]
            assert [t.dtype for t in got] == [t.dtype for t in want]
            for r, n in enumerate(counts):
                there = slice(r * rows, r * rows + n)
                wanted = ((want[0][there] >= 0) & (want[0][there] < here)).any(1)
                different.append(not torch.equal(got[1][there], want[1][there]))
                for of_rows, which in ((got[2:], wanted), (gradients, wanted), (every, slice(None))):
                    for a, b in zip(of_rows, want[2:], strict=True):
                        different.append(not torch.equal(a[there][which].float(), b[there][which].float()))
                values = [unpacked(of[2:], torch.bfloat16)[there][wanted] for of in (got, want)]
                different.append(not torch.equal(*values))
        return different, followed, hopper.kernels_ran["send codes"] - before


@pytest.mark.parametrize("ranks", [2, 3])
def test_exchanges_of_codes_are_those_of_allgather(hopper_ranks, folder, ranks):
    for different, followed, kernels in hopper_ranks.run(exchanges_of_codes, ranks, 8, folder)[:ranks]:
        assert len(different) == 5 * ranks * 8
        assert not any(different)
        assert followed == [[0] * (ranks - 1)]
        assert kernels == 2 * 3  # for each width that they take: tokens and gradients


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


# ---- "auto" ---------------------------------------------------------------------------------------------------------


@contextmanager
def machine(folder, rank, hosts="aaaa", gpus="0123", arch=None, missing=None, apart=None, nccl=True, most=32):
    """Hosts and GPUs of the ranks, a rank with another architecture, without packages or without access to other GPUs,
    whether groups have NCCL, and the most ranks.
    """
    arch_of = mock.Mock(return_value=80 if arch == rank else 90)
    with hopper.on_cpus(folder), ExitStack() as stack:
        for target, name, value in (
            (auto, "has_nccl", lambda group: nccl),
            (auto, "host_id", lambda: hosts[rank]),
            (auto, "gpu", lambda: gpus[rank]),
            (functions, "arch_of", arch_of),
            (functions.toolkit, "missing_packages", lambda: ("nvidia-cutlass-dsl",) if missing == rank else ()),
            (symmetric, "why_not", lambda: "no access" if apart == rank else None),
            (symmetric.Symmetric, "most_ranks", most),
            (torch.cuda, "current_device", lambda: 0),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield arch_of


def said(ep):
    """The settings, as where CUDA is available."""
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        return ep.settings()


@on_each
def taken(ep, folder, case):
    """The engines that "auto" takes for one and for P experts per token and with a capacity, and the settings."""
    with machine(folder, ep.rank, **case):
        before = collectives(ep.group, torch.device("cpu"))
        made = fm.ExpertParallel(ep.group, max_tokens=8)
        assert collectives(ep.group, torch.device("cpu")) == before  # which write to no weight
        limited = fm.ExpertParallel(ep.group, max_tokens=8, capacity=2.0)
        of_layers = [made.chosen_for(1), made.chosen_for(ep.ranks), limited.chosen_for(1)]
        assert "not 'symmetric'" not in of_layers[0].settings()  # without CUDA
        return [of.engine.name for of in (made, *of_layers)], said(made), said(of_layers[0])


@pytest.mark.parametrize(("size", "case", "reason"), [
    (4, {}, None),
    (2, {"hosts": "aabb", "gpus": "0101"}, None),
    (4, {"hosts": "aaba"}, "2 hosts or containers"),
    (4, {"gpus": "0113"}, "ranks share GPUs: 3 for 4 ranks"),
    (4, {"missing": 2}, "rank 2: expected the packages nvidia-cutlass-dsl"),
    (4, {"arch": 1}, "rank 1: cuda:0 is sm_80"),
    (4, {"apart": 3, "hosts": "abcd"}, "rank 3: no access"),
    (4, {"most": 3}, "4 ranks, expected at most 3"),
    (4, {"nccl": False}, "the group has no NCCL"),
])  # fmt: skip
def test_auto_takes_symmetric_if_all_ranks_can(hopper_ranks, folder, size, case, reason):
    fallback = ["allgather", "alltoall", "allgather", "allgather"]
    for engines, *settings in hopper_ranks.run(taken, size, None, folder, case)[:size]:
        assert engines == (["symmetric"] * 4 if reason is None else fallback)
        for text, engine in zip(settings, engines, strict=False):
            want = f"engine {engine!r}, " if reason is None else f"engine {engine!r} (not 'symmetric': {reason}"
            assert text.startswith(want)


@on_each
def other_groups(ep, folder):
    """Groups whose ranks do not ask each other, and one without collectives of CPU tensors, as that of NCCL alone."""
    with machine(folder, ep.rank, nccl=False) as asked:
        fm.ExpertParallel(ep.group)
        assert not asked.called
    with machine(folder, ep.rank) as asked:
        one = alone(engine="auto")
        assert not asked.called
    without_hosts = dist.new_group(backend="cuda:gloo")
    with machine(folder, ep.rank):
        assert fm.ExpertParallel(without_hosts, max_tokens=8).engine.name == "symmetric"
    return said(one)


def test_auto_of_other_groups(hopper_ranks, folder):
    for text in hopper_ranks.run(other_groups, 4, None, folder):
        assert text.startswith("engine 'allgather' (not 'symmetric': one rank), 1 ranks")


@on_each
def time_outs(ep):
    """Of a group, of the group of its hosts, and of one that has a part of its ranks. No other test makes these."""
    ranks = [0, 3]
    given = dist.new_group(ranks, backend="cuda:gloo", timeout=timedelta(seconds=77))
    if ep.rank not in ranks:
        return []
    groups = given, group_of_hosts(given), group_of([ep.rank], given)
    return [_timeout(group) for group in groups]


def test_groups_of_hosts_and_of_replicas_have_the_time_out_of_the_group(hopper_ranks):
    found = hopper_ranks.run(time_outs, 4, None)
    assert found == [[timedelta(seconds=77)] * 3, [], [], [timedelta(seconds=77)] * 3]


def of_mesh(rank, folder):
    """Of two groups on a host each, one has a GPU too few."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    with machine(folder, rank, hosts="aabb", gpus="0122"):
        ep = fm.ExpertParallel(mesh["ep"], max_tokens=hopper.MOST)
        made = [hopper.layer(of) for of in (ep, fm.ExpertParallel(mesh["ep"], "allgather", max_tokens=hopper.MOST))]
        x = torch.randn(5 + rank, hopper.HIDDEN).bfloat16()
        y, want = (layer(x) for layer in made)
        return ep.engine.name, torch.equal(y, want) and bool(y.any())


def test_auto_of_a_mesh(hopper_ranks, folder):
    assert hopper_ranks.run(of_mesh, folder) == [("symmetric", True)] * 2 + [("allgather", True)] * 2


def test_ids_of_this_machine(monkeypatch):
    if (boot := Path("/proc/sys/kernel/random/boot_id")).exists():
        assert agreement.host_id().startswith(boot.read_text().strip() + " pid:")
    monkeypatch.setattr(agreement.os, "readlink", mock.Mock(side_effect=OSError))
    monkeypatch.setattr(agreement.socket, "gethostname", lambda: "one")
    assert agreement.host_id() == "one"
    properties = mock.Mock(return_value=SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert auto.gpu() == "GPU-1"
    properties.assert_called_once_with(3)


@on_each
def copied(ep, folder):
    with hopper.on_cpus(folder):
        made = hopper.layer(symmetric_of(ep, 8))
        for op in (made.experts.gate_up, made.experts.down):
            op.weight.data.copy_(torch.randn(op.weight.shape, generator=torch.Generator().manual_seed(1)))
        with pytest.raises(fm.InputError, match="all ranks have the same values"):
            made(torch.randn(4, hopper.HIDDEN).bfloat16())


def test_copied_experts_are_an_error(hopper_ranks, folder):
    hopper_ranks.run(copied, 2, None, folder)


@on_each
def interrupted(ep, folder):
    """A gather that an error interrupts after its begin, and the exchanges after it; then an interrupted return."""
    with hopper.on_cpus(folder):
        engine = symmetric_of(ep, 4).engine
        x, index = torch.full((4, 8), ep.rank + 1.0).bfloat16(), torch.zeros(4, 2, dtype=torch.int64)
        found = []
        for step in range(3):
            kept = engine.start_gather_of_tokens([x + step], index, torch.ones(4, 2), 4, 2)  # an error keeps it alive
            if step != 1:
                kept.wait(2)
            found.append(engine.gather([x + step], 4)[0][:, 0].tolist())
        engine.channel(4096, x.device, returns=True)
        with pytest.raises(RuntimeError, match="an error has interrupted the exchange before this one"):
            engine.gather([x], 4)
        return found, kept.unfinished(2)[:4, 0].tolist()


@contextmanager
def at(stream, captured=()):
    """Calls on a stream, of those that are captured or not; the streams that it waits for."""
    waits = []
    current = SimpleNamespace(wait_stream=lambda other: waits.append(other.number))
    with ExitStack() as stack:
        for target, name, value in (
            (symmetric, "current_stream", lambda device: stream),
            (symmetric, "external_stream", lambda device, number: SimpleNamespace(number=number)),
            (symmetric, "_is_capturing", lambda other: other.number in captured),
            (torch.cuda, "current_stream", lambda device=None: current),
            (torch.cuda, "is_current_stream_capturing", lambda: stream in captured),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield waits


def tokens_of(engine, x):
    """Begin a gather of tokens."""
    return engine.start_gather_of_tokens([x], torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2), 4, 2)


@on_each
def streams(ep, folder):
    """The streams that exchanges wait for: eager ones, and those of two captures."""
    x, found = torch.ones(4, 8).bfloat16(), []
    with hopper.on_cpus(folder):
        engine = symmetric_of(ep, 4).engine
        for stream, captured in ((1, ()), (1, ()), (2, ()), (8, (8, 9)), (9, (8, 9)), (9, (8, 9)), (7, (7,)), (3, ())):
            with at(stream, captured) as waits:
                engine.gather([x], 4)
                found.append(waits)
    return found


def test_exchanges_follow_each_other_on_all_streams(hopper_ranks, folder):
    assert hopper_ranks.run(streams, 2, None, folder)[:2] == [[[], [], [1], [], [8], [], [], [2]]] * 2


@on_each
def interrupted_captures(ep, folder):
    """Errors inside captures leave eager calls alone. After an eager error, a graph cannot complete the exchange."""
    x, error = torch.full((4, 8), ep.rank + 1.0).bfloat16(), "an error has interrupted the exchange before this one, "
    with hopper.on_cpus(folder):
        engine, nbytes = symmetric_of(ep, 4).engine, 512
        engine.gather([x], 4)
        with at(5, (5,)), pytest.raises(fm.InputError, match="expected a call of this size before the capture"):
            engine.channel(1 << 30, x.device, returns=True)
        engine.gather([x], 4)
        with at(5, (5,)):
            engine.channel(nbytes, x.device, returns=True)
        engine.gather([x], 4)  # no rank has got wrong sums
        with at(5, (5,)):
            engine.channel(nbytes, x.device, returns=True)
            with pytest.raises(RuntimeError, match=f"{error}while a CUDA graph was captured: begin the capture again"):
                engine.channel(nbytes, x.device)
            engine.channel(nbytes, x.device)
        kept = tokens_of(engine, x)
        with at(5, (5,)), pytest.raises(RuntimeError, match=f"{error}which a graph cannot complete: run a layer"):
            engine.channel(nbytes, x.device)
        found = [engine.gather([x + 1], 4)[0][:, 0].tolist()]
        engine._captured = True  # as if it were part of a graph: it is never waited for
        dropped = tokens_of(engine, x)
        engine._captured = True
        engine._require_no_error("", capturing=False)
        with pytest.raises(RuntimeError, match="another exchange has begun before a product followed this one"):
            dropped.follow(torch.zeros(2, 1, dtype=torch.int32))
        return found, kept.unfinished(2)[:4, 0].tolist(), engine._unfinished is None


def test_captures_and_errors(hopper_ranks, folder):
    ranks = hopper_ranks.run(interrupted_captures, 2, None, folder)[:2]
    for found, _, complete in ranks:
        assert found == [[2.0] * 4 + [3.0] * 4]
        assert complete
    assert ranks[0][1] == [1.0] * 4  # the tokens want an expert of rank 0


@on_each
def interrupted_sums(ep, folder):
    """An error between the kernels of a return of sums: the other ranks have wrong ones."""
    with hopper.on_cpus(folder):
        made = symmetric_of(ep, 4)
        parts = torch.ones(ep.ranks * 4, 8).bfloat16()
        fixed.summed(made, [parts], 4)
        (key, sums), *_ = made.engine._sums.items()
        made.engine._sums[key] = sums._replace(total=mock.Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            fixed.summed(made, [parts], 4)
        with pytest.raises(RuntimeError, match="in which other ranks have got wrong sums"):
            made.engine.gather([parts[:4]], 4)


def test_an_error_inside_a_return_of_sums(hopper_ranks, folder):
    hopper_ranks.run(interrupted_sums, 2, None, folder)


def test_exchanges_after_an_error(hopper_ranks, folder):
    want = [[step + 1.0] * 4 + [step + 2.0] * 4 for step in range(3)]
    for found, _ in hopper_ranks.run(interrupted, 2, None, folder)[:2]:
        assert found == want
