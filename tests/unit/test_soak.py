"""`make soak` without a GPU: the kernels that it reaches, the faults that it finds, and that it ends."""

import json
import os
import shutil
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from emulator.gpu import emulated
from kit.exchanges_of_one_gpu import EXCHANGES, PRODUCTS, results_of

from benchmarks.soak import __main__ as command
from benchmarks.soak import direct, results, worker
from benchmarks.soak.direct import DIRECT
from benchmarks.soak.layers import DISTRIBUTIONS, LAYERS, Layer
from benchmarks.soak.watch import Soaked, family_of, soak
from benchmarks.soak.worker import Begins, Item, Repeats, Request, Wrong, nth_candidate, soak_here
from fusedmoe.kernels.build import compiler, toolkit
from fusedmoe.kernels.build.shipped import shipped
from fusedmoe.kernels.exchange import functions
from fusedmoe.kernels.exchange.layout import SCATTER_WARPS
from fusedmoe.kernels.sm90 import launch

pytestmark = pytest.mark.usefixtures("builtin_rules")
CPU = torch.device("cpu")
CASES = [(distribution, schedule) for distribution in DISTRIBUTIONS for schedule in worker.SCHEDULES]
SMALL = {"experts": 4, "top_k": 2, "rows": 32, "hidden": 64, "intermediate": 64}


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(toolkit, "missing_packages", lambda: ())
    monkeypatch.setattr(toolkit, "why_unusable", lambda: None)
    with emulated(seed=0) as found:
        yield found


@pytest.fixture
def one_case(monkeypatch):
    """One distribution and schedule only."""
    monkeypatch.setattr(worker, "DISTRIBUTIONS", {"zipf": DISTRIBUTIONS["zipf"]})
    monkeypatch.setattr(worker, "SCHEDULES", ("dynamic",))


def symbols_of(subjects, monkeypatch):
    """The kernels that are launched, by functions that do nothing. Weights and tokens have no values."""
    seen = set()
    with monkeypatch.context() as patch:  # which ends before the emulated GPU
        patch.setattr(compiler, "_load", lambda kernel: lambda *_: seen.add(kernel.symbol))
        patch.setattr(launch, "sm_count", lambda device: 132)
        for name in ("normal_", "div_"):
            patch.setattr(torch.Tensor, name, lambda t, *_, **__: t)
        for name in ("uniform_", "kaiming_uniform_", "normal_"):
            patch.setattr(torch.nn.init, name, lambda t, *_, **__: t)
        patch.setattr(torch, "randn", lambda *shape, **_: torch.empty(shape))
        patch.setattr(torch.linalg, "qr", lambda t: SimpleNamespace(Q=t))
        patch.setattr(torch, "equal", lambda *_: True)
        for subject in subjects:
            made = subject.make(CPU)
            for tiles in range(subject.tiles):
                with nth_candidate(tiles):
                    made.results(made.call("even", "dynamic"))
    return seen


SUBJECTS = (*LAYERS, *DIRECT)


def smaller(subject):
    """A subject with an eighth of the experts, if they have weights: the plans are the same."""
    if isinstance(subject, direct.Direct) or subject.kind in ("rows", "first", "stored", "tokens"):
        return replace(subject, experts=subject.experts // 8)
    return subject


def test_every_shipped_kernel_is_reached(gpu, monkeypatch):
    expected = {kernel.symbol for kernel in shipped("sm_90a")}
    expected.remove("sm90_route_int64_fp32_128_chunked")  # `Route` is compiled for numbers of experts
    assert expected - symbols_of(map(smaller, SUBJECTS), monkeypatch) == set()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, which links the kernels' host code")
@pytest.mark.parametrize("name", [*EXCHANGES, *PRODUCTS])
def test_exchanges_and_products_beside_them(gpu, monkeypatch, name):
    few = {"SEND_CTAS": 2, "TOTAL_CTAS": 3, "SCATTER_CTAS": 4, "SCATTER_SMS": 2, "SCATTER_ARRIVALS": 2 * SCATTER_WARPS}
    for owner, sizes in ((functions, few), (direct, {"FEW_SMS": 2})):
        for size, value in sizes.items():
            monkeypatch.setattr(owner, size, value)
    got = results_of(name, CPU)
    assert got
    assert all(t.float().norm() > 1 for t in got.values())


@dataclass(frozen=True)
class Toy:
    """A kernel of ``out = 2 x``, which counts its tiles, adds to a sum, and does something else in some calls."""

    fault: str = ""

    @property
    def symbol(self):
        return f"toy_{self.fault}"

    def load(self):
        calls = []

        def run(x, out, total, counter):
            calls.append(len(calls))
            faulty = self.fault if len(calls) == 4 else ""  # the first is recorded
            out.copy_(2 * x)
            total.add_(x)
            if faulty == "wrong":
                out[3] += 1
            elif faulty == "unwritten":
                out.copy_(torch.where(torch.arange(len(x)) == 5, torch.nan, 2 * x))
                out.view(torch.int32)[5] = -1
            elif faulty == "counter":
                counter.fill_(1)
            elif faulty == "error":
                raise RuntimeError("an illegal access")

        return run


class ToyCall:
    """A subject that runs toy kernels."""

    name, tiles = "a toy", 1

    def __init__(self, *kernels):
        self.kernels = kernels

    def make(self, device):
        return self

    def call(self, distribution, schedule):
        return None

    def results(self, call):
        x, total, counter = torch.arange(8.0), torch.ones(8), torch.zeros(1, dtype=torch.int32)
        for kernel in self.kernels:
            out = torch.empty(8)
            compiler.load(kernel)(x, out, total, counter)
        x.fill_(7)  # a later change of an argument
        return {"y": out}


@pytest.fixture
def toys(monkeypatch, one_case):
    monkeypatch.setattr(compiler, "_state", compiler._State({}, {}, set()))
    monkeypatch.setattr(compiler, "_load", lambda kernel: kernel.load())


def soaked(*kernels, calls=9, **how):
    """The messages of a soak of toy kernels."""
    messages = []
    symbols = [kernel.symbol for kernel in kernels]
    soak_here(Request("cpu", (ToyCall(*kernels),), dict.fromkeys(symbols, calls), **how), messages.append)
    assert messages.pop() is None
    return [m for m in messages if not isinstance(m, worker.Said)]


def of_kind(messages, kind):
    return [m for m in messages if isinstance(m, kind)]


def test_a_kernel_without_faults_is_repeated_unless_it_is_finished_or_refused(toys):
    kernels = Toy(), Toy("other"), Toy("other"), Toy("refused"), Toy("last")
    done, refused = frozenset({Item("toy_", "zipf", "dynamic")}), frozenset({"toy_refused"})
    messages = soaked(*kernels, calls=10, done=done, refused=refused)
    (first, second) = of_kind(messages, Repeats)
    assert first[:4] == second[:4] == (Item("toy_other", "zipf", "dynamic"), 5, 0, 0), "divided among two launches"
    assert of_kind(messages, Wrong) == []
    begun = {m.symbol for m in of_kind(messages, Begins)}
    assert begun == {"", "toy_", "toy_other"}, "the call ends before it launches the refused kernel"


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("wrong", "call 3: 1 words differ from the first call's"),
        ("unwritten", "call 3: 1 words differ from the first call's"),
        ("counter", "calls 1 to 5 changed argument 3, int32 (1,)"),
        ("error", "RuntimeError: an illegal access"),
    ],
)
def test_faults_are_found(toys, fault, problem):
    messages = soaked(Toy(fault), Toy())
    (wrong,) = of_kind(messages, Wrong)
    assert (wrong.symbol, wrong.problem) == (f"toy_{fault}", problem)
    assert wrong.where == "a toy, zipf, dynamic, tiles 0"
    found = {m.item.symbol: m.differing for m in of_kind(messages, Repeats)}
    assert found.get(f"toy_{fault}") == {"wrong": 1, "unwritten": 1, "counter": 0}.get(fault)


def test_the_first_call_of_a_layer_is_compared_with_pytorch():
    made = Layer(kind="rows", scaled=True, **{**SMALL, "experts": 8, "rows": 600}).make(CPU)
    call = made.call("mixed", "static")
    call = replace(call, case=replace(call.case, recipe="fp8_tensor"))
    want = made.expected(call)
    assert results.wrong_results(call, want, want) == []
    assert set(want) == {"y", "x", "probs", "0.weight", "3.weight"}
    zeros = {name: torch.zeros_like(t) for name, t in want.items()}
    assert len(results.wrong_results(call, zeros, want)) >= len(want)
    weight = want["0.weight"].clone()
    weight[max(range(8), key=call.case.layout.splits.__getitem__), :16] = torch.nan
    assert results.wrong_results(call, {**want, "0.weight": weight}, want)
    tail, few = want["y"].clone(), min(filter(None, call.case.layout.splits))
    tail[-1] = 1
    assert call.ends[-1] < len(tail)
    assert results.wrong_results(call, {**want, "y": tail}, want) == ["y: the rows without an expert are not zeros"]
    of_expert, last = want["y"].clone(), call.ends[call.case.layout.splits.index(few)]
    of_expert[last - few : last] = 0  # below the bound of the whole result
    problems = results.wrong_results(call, {**want, "y": of_expert}, want)
    assert problems == ["y: relative error 1 of an expert, bound 0.25"]


def hanging(request, connection):
    """Hangs in one kernel, dies in the next one, and then finishes the others."""
    for symbol in request.calls:
        if symbol in request.refused:
            continue
        connection.send(Begins(symbol, "a layer, zipf", request.limit_s))
        if symbol == "toy_hangs":
            time.sleep(600)
        elif symbol == "toy_dies":
            os._exit(3)
        for case in CASES:
            if Item(symbol, *case) not in request.done:
                connection.send(Repeats(Item(symbol, *case), request.calls[symbol], 1, 0, 0.5))
    connection.send(None)


@pytest.mark.slow  # starts three processes
def test_a_process_that_hangs_or_dies_is_an_error_with_the_kernels_name():
    kernels = [Toy("before"), Toy("hangs"), Toy("dies"), Toy("after")]
    lines = []
    begin = time.monotonic()
    found = soak(kernels, (), "cpu", lines.append, calls=24, target=hanging, limit_s=1.0)
    assert time.monotonic() - begin < 300
    assert [(w.symbol, w.problem) for w in found.wrong] == [
        ("toy_hangs", "a call did not end within 1 s"),
        ("toy_dies", "the process died (exit status 3)"),
    ]
    assert lines[0] == "FAILED toy_hangs: a call did not end within 1 s (a layer, zipf)"
    assert found.ended == {"toy_hangs", "toy_dies"}
    assert found.calls == {"toy_before": 24, "toy_after": 24}  # each once
    assert found.not_reached() == ["toy_hangs: not reached", "toy_dies: not reached"]
    assert not found.passed


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a Hopper GPU, on which a toy kernel is wrong; ``asked`` has the kernels and calls of each soak."""
    found = SimpleNamespace(device=CPU, arch=90, name="a stand-in", driver="1.2.3", asked=[])

    def soak(kernels, subjects, device, say, calls):
        found.asked.append(([kernel.symbol for kernel in kernels], calls))
        outcome = Soaked({family_of(Toy()): ["toy_"]}, 12)
        for case in CASES:
            outcome.add(Repeats(Item("toy_", *case), 1, 0, 0, 0.25))
        assert outcome.passed
        outcome.wrong.append(Wrong("toy_", "a layer, zipf", "call 3: 5 words differ from the first call's"))
        outcome.differing["toy_"] = 1
        return outcome

    monkeypatch.setattr(command, "find_gpu", lambda: found)
    monkeypatch.setattr(command.watch, "soak", soak)
    monkeypatch.setattr(command.ahead_of_time, "run", lambda options: 0)
    monkeypatch.setattr(command.results, "ROOT", tmp_path)
    monkeypatch.setattr(toolkit, "missing_packages", lambda: ())
    return found


def test_the_command_fails_with_the_kernels_name(machine, tmp_path, capsys):
    file = tmp_path / "soak.json"
    assert command.main(["--only", "sm90_ragged_k_e4m3*", "--calls", "7", "--json", str(file)]) == 1
    ((symbols, calls),) = machine.asked
    assert (calls, len(symbols)) == (7, 21)
    out = capsys.readouterr().out
    assert "FAILED toy_: call 3: 5 words differ from the first call's (a layer, zipf)" in out
    line = next(line for line in out.splitlines() if line.startswith("Toy "))
    assert line.split() == ["Toy", "1", "12", "0", "1", "0", "3.0"]
    data = json.loads(file.read_text())
    assert (data["passed"], data["only"], data["gpu"]) == (False, "sm90_ragged_k_e4m3*", "a stand-in")
    assert not [*tmp_path.glob("results/*/soak.json")], "only a run of all kernels is kept"
    assert command.main([]) == 1
    (written,) = tmp_path.glob("results/*/soak.json")
    assert json.loads(written.read_text())["only"] is None
