"""`fusedmoe verify` on a CPU, which stands in for a GPU: stand-ins compute what the kernels do."""

import contextlib
import itertools
import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kit import sm90_stand_ins, sm100_stand_ins

import fusedmoe as fm
from fusedmoe.commands.main import main
from fusedmoe.commands.verify import command as command
from fusedmoe.commands.verify import rules as whole
from fusedmoe.commands.verify.ahead import compile_ahead, one_per_layout
from fusedmoe.commands.verify.calls import make_call
from fusedmoe.commands.verify.cases import ATOMIC, BETWEEN_RANKS, BOUNDS, LAYOUTS, Case, Layout, Sizes, cases_for
from fusedmoe.commands.verify.checks import Found, Outcome, run_case
from fusedmoe.commands.verify.machine import poisoned_memory
from fusedmoe.commands.verify.rules import verify
from fusedmoe.kernels.build import compiler, toolkit
from fusedmoe.kernels.sm90 import products
from fusedmoe.kernels.sm100 import grouped, grouped_nvfp4, package, quantize_functions

pytestmark = pytest.mark.usefixtures("builtin_rules")
CPU = torch.device("cpu")
SMALL = Sizes(hidden=128, intermediate=128, shared=128)
LAYOUT = Layout("few rows", (5, 0, 1, 9), 3)
EXPERTS = Case("experts", "bf16", LAYOUT)
SLOTS = Layout("few slots", (5, 0, 2, 9), 4)
MXFP8 = Case("experts", "mxfp8", LAYOUT)
ROUTED = Case("routed", "bf16", LAYOUT)
FAST = 2  # repeats


class Machine:
    """A CPU in place of a GPU. ``wrong`` names the function whose results it changes."""

    device, name, driver = CPU, "a stand-in", "1.2.3"

    def __init__(self, arch=90, wrong=""):
        self.arch, self.wrong = arch, wrong

    def replayed(self, call):
        return self._maybe_wrong("replayed", call())

    def on_two_streams(self, call):
        return [call(), self._maybe_wrong("on_two_streams", call())]

    def _maybe_wrong(self, name, results):
        return {n: t + 1 for n, t in results.items()} if name == self.wrong else results


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.setattr(whole, "SIZES", SMALL)
    monkeypatch.setattr(verify, "__defaults__", (None, SMALL, FAST, *verify.__defaults__[3:]))
    monkeypatch.setenv("FUSEDMOE_CACHE_DIR", str(tmp_path / "cache"))
    package._why_not_stamped.cache_clear()
    yield
    package._why_not_stamped.cache_clear()


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: 90)
    sm90_stand_ins.install(monkeypatch.setattr, router=True)
    monkeypatch.setattr(toolkit, "missing_packages", lambda: ())
    monkeypatch.setattr(toolkit, "why_unusable", lambda: None)
    return Machine(90)


@pytest.fixture
def blackwell(monkeypatch):
    monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: 100)
    for name, function in sm100_stand_ins.GROUPED.items():
        monkeypatch.setattr(grouped, name, function)
    for name, function in sm100_stand_ins.GROUPED_NVFP4.items():
        monkeypatch.setattr(grouped_nvfp4, name, function)
    sm90_stand_ins.install(monkeypatch.setattr)  # those of the kernels that sort, move and sum rows
    for name, function in sm100_stand_ins.QUANTIZE.items():
        monkeypatch.setattr(quantize_functions, name, function)
    monkeypatch.setattr(toolkit, "why_unusable", lambda: None)
    monkeypatch.setattr(package, "why_missing", lambda: None)
    monkeypatch.setattr(package, "machine_architectures", lambda: (100,))
    return Machine(100)


def run(machine, *cases, json_file=None):
    options = command.VerifyOptions(json=None if json_file is None else str(json_file))
    return command.run(options, lambda: machine, cases, FAST)


def changed(monkeypatch, name, change):
    """Let the functions that a ``bind`` function returns have another first result: ``change(result, call number)``."""
    bind, count = getattr(products, name), itertools.count(1)

    def other(*args, **kwargs):
        bound = bind(*args, **kwargs)

        def run(*tensors, **named):
            results = bound(*tensors, **named)
            if isinstance(results, tuple):
                return (change(results[0], next(count)), *results[1:])
            return change(results, next(count))

        return run

    monkeypatch.setattr(products, name, other)


def only(monkeypatch, rules):
    monkeypatch.setattr(whole, "BUILTIN", [rule for rule in whole.BUILTIN if rule.name in rules])


# ---- the cases ------------------------------------------------------------------------------------------------------


def test_the_command_passes_and_prints_a_table(hopper, capsys):
    assert run(hopper, EXPERTS, ROUTED, Case("dense", "bf16", LAYOUTS[0])) == 1  # few cases do not cover all rules
    out = capsys.readouterr().out
    assert "a stand-in (sm_90), driver 1.2.3, fusedmoe " in out
    line = next(line for line in out.splitlines() if line.startswith("sm90.grouped_gemm_activation "))
    assert line.split()[1:] == ["1", line.split()[2], "0.015", "2/2", "yes", "yes", "yes"]
    assert 0 < float(line.split()[2]) < 0.01
    assert "sm90.fp8_grouped_gemm: no case ran it" in out
    assert "sm90.gemm_of_leaving_rows: runs beside exchanges between ranks: not checked" in out
    assert "FAILED" not in out


def rules_of(case, sizes=None):
    call = make_call(case, Sizes() if sizes is None else sizes, CPU)
    with fm.disabled(*case.disabled) if case.disabled else contextlib.nullcontext():
        plans = call.explain().plans
    return {step.rule for plan in plans for step in (*plan.steps, *plan.glue)} - {None}


@pytest.mark.parametrize("arch", [90, 100])
def test_the_cases_cover_every_rule(arch, request):
    request.getfixturevalue("hopper" if arch == 90 else "blackwell")
    with package.being_verified():
        covered = {rule for case in cases_for(arch) for rule in rules_of(case)}
    every = {rule.name for rule in fm.rules() if rule.name.startswith(f"sm{arch}.")}
    assert every - covered == set(BETWEEN_RANKS if arch == 90 else ())


def test_cases_and_bounds():
    for arch in (90, 100):
        cases = cases_for(arch)
        assert len({case.name for case in cases}) == len(cases)
        assert {layout.name for layout in LAYOUTS} <= {case.layout.name for case in cases}
        assert len(one_per_layout(cases)) == len({replace(case, layout=LAYOUT) for case in cases}) < len(cases)
    assert (cases_for(80), cases_for(103)) == ((), cases_for(100))
    for bounds in BOUNDS.values():  # zeros have an error of 1
        assert 0 < bounds.unfused < 0.5
        assert bounds.rounding is None or bounds.rounding < bounds.unfused
    assert all(width % 256 == 128 for width in vars(Sizes()).values())
    assert set(BETWEEN_RANKS) | set(ATOMIC) <= {rule.name for rule in fm.rules()}


@pytest.mark.parametrize(
    "case", [case for case in cases_for(100) if case.recipe == "nvfp4, stochastic"], ids=lambda case: case.name
)
def test_nvfp4_on_blackwell(blackwell, case):
    with package.being_verified():
        outcome = run_case(case, Sizes(), blackwell, FAST)
    assert outcome.found.problems == ()
    assert {*outcome.rules} > {"sm100.grouped_gemm_activation_quantize", "sm100.grouped_wgrad", "sm100.quantize_grad"}
    assert outcome.found.repeats == (2, 2)
    # it draws other numbers in the replay of a graph, and on another stream
    assert (outcome.found.graph, outcome.found.streams, outcome.found.rounding_error) == (None, None, None)
    assert 0 < outcome.found.error < BOUNDS[case.recipe].unfused


@pytest.mark.parametrize(
    ("module", "recipe"),
    [
        ("experts", "fp8_tensor, delayed"),
        ("experts", "mxfp8"),
        ("moe", "bf16"),
        ("weighted_at_the_end", "bf16"),
        ("routed_layer", "bf16"),
        ("stored_weights", "fp8_block"),
    ],
)
def test_on_hopper(hopper, module, recipe):
    found = run_case(Case(module, recipe, LAYOUT), SMALL, hopper, FAST).found
    assert (found.problems, found.repeats) == ((), (2, 2))
    assert (found.graph is None) == ("delayed" in recipe)
    assert found.error < BOUNDS[recipe].unfused


def test_new_memory_is_nan_also_in_backward():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return torch.empty_like(grad)

    x = torch.ones(3, requires_grad=True)
    with poisoned_memory():
        Twice.apply(x).sum().backward()
        codes = x.new_empty(4, dtype=torch.float8_e4m3fn)
        assert codes.float().isnan().all()
        assert torch.empty(2, 3, dtype=torch.bfloat16).isnan().all()
    assert x.grad.isnan().all()


# ---- wrong kernels --------------------------------------------------------------------------------------------------


def failure(capsys, machine, case):
    assert run(machine, case) == 1
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]


def row_of_zeros(t, count):
    t[7] = 0
    return t


def tail_of_ones(t, count):
    t[sum(LAYOUT.splits) :] = 1
    return t


def row_not_written(t, count):
    t[1] = torch.empty_like(t)[1]
    return t


WGRAD, GEMM = "bind_grouped_wgrad", "bind_grouped_gemm"
MANY = Case("experts", "fp8_block", Layout("many rows", (600, 0)))


@pytest.mark.parametrize(
    ("kernel", "change", "case", "problem", "rule"),
    [
        (WGRAD, lambda t, _: t * 1.03, EXPERTS, "0.weight: relative error 0.03", ""),
        (GEMM, lambda t, _: t * 0, EXPERTS, "y: relative error 1 against", ""),
        (GEMM, row_of_zeros, MANY, "y: 1 rows have a relative error above 0.5", "sm90.fp8_grouped_gemm"),
        (GEMM, tail_of_ones, EXPERTS, "y: the rows without an expert are not zeros", ""),
        (GEMM, row_not_written, EXPERTS, "y: relative error inf", ""),
        (WGRAD, lambda t, count: t * (1 + count % 3 / 128), EXPERTS, "of 2 repeats differ", ""),
    ],
    ids=["3 percent", "zeros", "a row", "tail", "not written", "other bits"],
)
def test_a_wrong_kernel(hopper, capsys, monkeypatch, kernel, change, case, problem, rule):
    changed(monkeypatch, kernel, change)
    lines = failure(capsys, hopper, case)
    assert any(problem in line for line in lines)
    rule = rule or kernel.replace("bind_", "sm90.")
    assert all(f"({rule}" in line or f", {rule}" in line for line in lines)


def test_a_kernel_that_raises(hopper, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal instruction")

    monkeypatch.setattr(products, "bind_grouped_wgrad", fail)
    (line,) = failure(capsys, hopper, EXPERTS)
    assert "RuntimeError: CUDA error: an illegal instruction (sm90.grouped_wgrad)" in line


def test_a_capture_that_fails(hopper, capsys, monkeypatch):
    """Torch raises a second error when it ends the capture."""

    def replayed(call):
        try:
            raise ValueError("a copy to the host")
        finally:
            raise RuntimeError("a previous error during capture")

    monkeypatch.setattr(hopper, "replayed", replayed)
    (line,) = failure(capsys, hopper, EXPERTS)
    assert "ValueError: a copy to the host; then RuntimeError: a previous error during capture" in line


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [("replayed", "the replay of a CUDA graph differs"), ("on_two_streams", "calls on two streams differ")],
)
def test_graphs_and_streams(hopper, capsys, wrong, problem):
    hopper.wrong = wrong
    (line,) = failure(capsys, hopper, EXPERTS)
    assert problem in line
    assert "sm90.grouped_gemm," in line  # no rule alone is to blame


def test_a_case_in_which_no_rule_runs(capsys):
    assert run(Machine(90), EXPERTS) in (1, 2)
    outcome = run_case(EXPERTS, SMALL, Machine(90), FAST)
    assert outcome.found.problems == ("no rule ran",)


# ---- Blackwell, and its stamp ---------------------------------------------------------------------------------------


def stamp():
    return json.loads(package.stamp_file(100).read_text())


def test_a_stamp_turns_the_rules_on(blackwell, capsys, monkeypatch):
    assert not rules_of(MXFP8, SMALL)
    assert "run `fusedmoe verify`" in package.why_unverified()
    with package.being_verified():
        assert package.why_unverified() is None
        covered = rules_of(MXFP8, SMALL)
    only(monkeypatch, covered)
    assert package.why_unverified() is not None
    assert run(blackwell, MXFP8) == 0
    assert "the rules for sm_100 are on" in capsys.readouterr().out
    found = stamp()
    assert (found["architecture"], found["passed"], found["gpu"]) == ("sm_100", True, "a stand-in")
    assert found["versions"] == package.versions()
    assert package.why_unverified() is None
    assert rules_of(MXFP8, SMALL) == covered > {"sm100.grouped_gemm_activation_quantize", "sm100.quantize_grad"}


def test_the_rounding_of_the_kernels(blackwell):
    with package.being_verified():
        for case in (
            *(Case("experts", "mxfp8", LAYOUT, name) for name in ("clamped swiglu", "squared relu")),
            Case("routed", "mxfp8", SLOTS, frozen_bias=True),
        ):
            found = run_case(case, SMALL, blackwell, FAST).found
            assert found.problems == (), case.name
            assert 0 < found.rounding_error < 0.003
            assert found.rounding_bound == 0.01


def test_an_error_below_that_of_the_emulation_shows(blackwell, capsys, monkeypatch):
    plain = grouped.gemm
    monkeypatch.setattr(grouped, "gemm", lambda *operands: plain(*operands) * 1.02)
    lines = failure(capsys, blackwell, MXFP8)
    assert [line.split(": ")[1] for line in lines] == ["y", "x"]
    for line in lines:
        assert "relative error 0.02" in line
        assert "against the rounding of the kernels, bound 0.01 (" in line
    assert stamp()["passed"] is False
    assert "`fusedmoe verify` failed or did not finish on this machine" in package.why_unverified()


def test_bits_of_atomics_may_differ_in_the_gradient_of_the_scale(blackwell, monkeypatch):
    plain, factors = grouped.gemm_derivative_quantize, itertools.count(1.0, 1e-6)

    def atomics(*operands):
        rows, columns, dfactor = plain(*operands)
        return rows, columns, dfactor * next(factors)

    monkeypatch.setattr(grouped, "gemm_derivative_quantize", atomics)
    with package.being_verified():
        assert run_case(MXFP8, SMALL, blackwell, FAST).found.problems == ()


def written(**changes):
    package.write_stamp(100, True)
    path = package.stamp_file(100)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    package._why_not_stamped.cache_clear()
    return package.why_unverified()


def test_stamps_that_do_not_count(blackwell, monkeypatch):
    for changes, why in (
        ({}, None),
        ({"versions": {**package.versions(), "torch": "1.0"}}, "torch 1.0 -> "),
        ({"architecture": "sm_103"}, "is of sm_103, this GPU is sm_100"),
        ({"passed": "yes"}, "`fusedmoe verify` failed or did not finish"),
        ({"versions": None}, "is unreadable"),
    ):
        found = written(**changes)
        assert found is why or why in found
    package.stamp_file(100).write_text("{")
    package._why_not_stamped.cache_clear()
    assert "is unreadable" in package.why_unverified()
    assert written() is None
    monkeypatch.setattr(package, "machine_architectures", lambda: (103,))  # a stamp of sm_100 is not one of sm_103
    assert "not verified on this machine: run `fusedmoe verify`" in package.why_unverified()
    monkeypatch.setattr(package, "machine_architectures", lambda: (100, 103))
    assert package.why_unverified() is not None
    package.write_stamp(103, True)
    assert package.why_unverified() is None


def test_a_command_that_does_not_finish_leaves_no_valid_stamp(blackwell, monkeypatch):
    def interrupted(*operands):
        assert package.why_unverified() is None
        raise KeyboardInterrupt

    package.write_stamp(100, True)
    monkeypatch.setattr(grouped, "gemm", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(blackwell, MXFP8)
    assert "did not finish" in package.why_unverified()


def test_no_directory_for_the_stamp(blackwell, capsys, monkeypatch):
    monkeypatch.setenv("FUSEDMOE_CACHE_DIR", "0")
    assert run(blackwell, MXFP8) == 1
    assert "the result is not kept: there is no cache directory; set FUSEDMOE_CACHE_DIR" in capsys.readouterr().err
    assert "with a cache directory" in package.why_unverified()


# ---- JSON and machines ----------------------------------------------------------------------------------------------


def test_json(hopper, capsys, tmp_path, monkeypatch):
    passing = {*rules_of(EXPERTS, SMALL), BETWEEN_RANKS[0]}
    only(monkeypatch, passing)
    file = tmp_path / "verify.json"
    assert run(hopper, EXPERTS, Case("dense", "bf16"), json_file=file) == 0
    assert "6 of 6 rules passed, 1 more not checked, 2 cases" in capsys.readouterr().out
    found = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    rules = {rule["rule"]: (rule["passed"], rule["cases"], rule["repeats"]) for rule in found["rules"]}
    assert set(rules) == passing
    assert rules["sm90.grouped_gemm"] == (True, 1, [2, 2])
    assert run(hopper, EXPERTS, json_file=tmp_path / "missing" / "verify.json") == 1
    assert "cannot write" in capsys.readouterr().err


def test_no_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["verify"]) == 2
    assert "torch sees no NVIDIA GPU to verify" in capsys.readouterr().err
    assert run(Machine(80), EXPERTS) == 2
    assert "no kernels for this GPU, a stand-in (sm_80)" in capsys.readouterr().err


def test_a_missing_package(blackwell, capsys, monkeypatch):
    monkeypatch.setattr(package, "why_missing", lambda: "needs nvidia-cudnn-frontend 1.32")
    assert run(blackwell, MXFP8) == 2
    assert "cannot run here: needs nvidia-cudnn-frontend 1.32" in capsys.readouterr().err
    assert not package.stamp_file(100).exists()


@pytest.mark.parametrize(
    ("options", "disabled", "said"), [([], "sm90.*", "no rules switched off"), (["--only", "sm90_*"], "", "make soak")]
)
def test_refusals(monkeypatch, capsys, options, disabled, said):
    monkeypatch.setenv("FUSEDMOE_DISABLE", disabled)
    with pytest.raises(SystemExit) as caught:
        main(["verify", *options])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_an_expected_result_of_zeros_is_a_problem(hopper, monkeypatch):
    call = make_call(EXPERTS, SMALL, CPU)
    call.grad_output.zero_()
    monkeypatch.setattr("fusedmoe.commands.verify.checks.make_call", lambda *args: call)
    problems = run_case(EXPERTS, SMALL, hopper, FAST).found.problems
    assert "0.weight: the expected result is zeros, so zeros would pass" in problems


# ---- kernels that are compiled ahead --------------------------------------------------------------------------------

AHEAD = [Case("experts", recipe, layout) for recipe in ("bf16", "fp16", "fp8_block") for layout in LAYOUTS[:2]]


def write_down(case):
    """Runs in a process of the pool."""
    folder = os.environ["FUSEDMOE_CACHE_DIR"]
    with open(f"{folder}/{case.name}-{os.getpid()}", "w"):
        pass
    if case.recipe == "fp16":
        raise RuntimeError("a kernel that does not compile")


def test_a_case_per_set_of_kernels_runs_in_another_process(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDMOE_CACHE_DIR", str(tmp_path))
    said = []
    compile_ahead(AHEAD, Sizes(), CPU, said.append, write_down, processes=2)
    ran = [path.name.rsplit("-", 1) for path in tmp_path.iterdir() if "experts" in path.name]
    assert sorted(name for name, _ in ran) == sorted(case.name for case in AHEAD[::2])
    assert str(os.getpid()) not in {process for _, process in ran}
    assert said == ["compiling the kernels of 3 cases in 2 processes"]


def test_it_begins_after_the_first_case_that_compiles(monkeypatch):
    """Cases whose kernels are all in the cache compile nothing."""
    ran, ahead = [], []

    def run_case(case, *settings):
        ran.append(case)
        return Outcome(case, ("a rule",), Found())

    monkeypatch.setattr(whole, "run_case", run_case)
    monkeypatch.setattr(whole, "_rules_of", lambda machine: [])
    monkeypatch.setattr(compiler, "stats", lambda: SimpleNamespace(compiled=max(0, len(ran) - 1)))
    verify(SimpleNamespace(device=CPU, arch=90), AHEAD, Sizes(), compile_ahead=lambda *given: ahead.append(given))
    assert (ran, ahead) == (AHEAD, [(AHEAD[2:], Sizes(), CPU)])


@pytest.mark.parametrize("case", [EXPERTS, ROUTED], ids=lambda case: case.module)
def test_rows_without_an_expert_are_nan(case):
    call = make_call(case, SMALL, CPU)
    assert call.used.any()
    if case is EXPERTS:
        assert not call.used.all()
        assert call.inputs["probs"][~call.used].isnan().all()
    assert call.x[~call.used].isnan().all()
    assert call.grad_output[~call.used].isnan().all()
    assert call.x[call.used].isfinite().all()
