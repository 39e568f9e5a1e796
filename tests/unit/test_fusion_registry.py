"""Which rules there are: registered ones, those of entry points, and what is wrong with either."""

import subprocess
import sys
import traceback

import pytest
import torch
from kit import toy

import fusedmoe as fm
from fusedmoe.call.partition import partition_for
from fusedmoe.commands import doctor
from fusedmoe.fusion.language import registry
from fusedmoe.fusion.language.rule import RuleError
from fusedmoe.fusion.report.data import Status


def test_import_registers_the_builtin_rules():
    code = "import fusedmoe as fm; from fusedmoe.builtin_rules import BUILTIN; assert set(BUILTIN) <= set(fm.rules())"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_register_holds_for_a_block():
    a, b = toy.gemm("toy.a"), toy.gemm("toy.b")
    before = fm.rules()
    with fm.register(b, a):
        assert [r for r in fm.rules() if r not in before] == [a, b]  # by name
    assert fm.rules() == before


def test_register_holds_until_removed():
    rule = toy.gemm()
    registration = fm.register(rule)
    assert rule in fm.rules()
    registration.remove()
    assert rule not in fm.rules()
    registration.remove()  # twice does nothing


def test_a_block_that_raises_removes_its_rules():
    rule = toy.gemm()
    with pytest.raises(KeyError), fm.register(rule):
        raise KeyError
    assert rule not in fm.rules()


def test_another_rule_of_the_same_name_is_refused():
    with fm.register(toy.gemm("toy.a")):
        with pytest.raises(RuleError, match=r"a rule named 'toy.a' is registered already: toy.gemm.<locals>.Gemm"):
            fm.register(toy.gemm_glu("toy.a"))
        assert len([r for r in fm.rules() if r.name == "toy.a"]) == 1


def test_a_refused_registration_registers_nothing():
    before = fm.rules()
    with fm.register(toy.gemm("toy.a")):
        with pytest.raises(RuleError):
            fm.register(toy.gemm("toy.b"), toy.gemm("toy.a"))
        with pytest.raises(RuleError, match="expected a subclass of FusionRule, got 3"):
            fm.register(toy.gemm("toy.c"), 3)
        assert [r.name for r in fm.rules() if r not in before] == ["toy.a"]


def test_the_same_rule_registered_twice_stays_until_the_first_is_removed():
    rule = toy.gemm()
    with fm.register(rule):
        with fm.register(rule):
            pass
        assert rule in fm.rules()
    assert rule not in fm.rules()


def test_what_is_no_rule_is_refused():
    for wrong in (3, fm.SwiGLU, toy.gemm()({"fc": None})):
        with pytest.raises(RuleError, match="expected a subclass of FusionRule, got"):
            fm.register(wrong)


def test_every_change_changes_the_generation():
    seen = [registry.generation()]
    with fm.register(toy.gemm()):
        seen.append(registry.generation())
    seen.append(registry.generation())
    assert len(set(seen)) == 3


def test_patterns_that_switch_rules_off():
    def why(*patterns):
        return registry.why_unavailable(toy.gemm("sm90.gemm"), torch.device("cpu"), None, patterns)

    assert why("sm100.*", "sm90.*") == ("switched off by 'sm90.*'", "switch")
    assert why("SM90.*", "gemm") is None
    assert why() is None


class WordlessError(Exception):
    def __str__(self):
        raise ValueError("no text")


WORDLESS = "".join(traceback.format_exception_only(WordlessError())).strip()


class Dist:
    name = "a-package"


class Entry:
    """An entry point that gives a value, or raises it."""

    name, value, dist = "toys", "a_package:rules", Dist()

    def __init__(self, loaded):
        self.loaded = loaded

    interrupts = True

    def load(self):
        if isinstance(self.loaded, KeyboardInterrupt) and not self.interrupts:
            return []
        if isinstance(self.loaded, BaseException):
            raise self.loaded
        return self.loaded


@pytest.fixture
def entry_points():
    """A process whose rules are not loaded yet, with these entry points."""
    with pytest.MonkeyPatch.context() as patch:

        def install(*loaded):
            patch.setattr(registry, "_registry", registry._Registry())
            found = [Entry(value) for value in loaded]
            patch.setattr(registry, "entry_points", lambda group: found if group == "fusedmoe.fusions" else [])

        yield install


def test_entry_points_give_a_rule_or_several(entry_points):
    a, b, c = (toy.gemm(f"toy.{n}") for n in "abc")
    entry_points([b, c], a)
    assert [r.name for r in fm.rules()] == ["toy.a", "toy.b", "toy.c"]
    assert fm.rules() == (a, b, c)


def test_rules_are_loaded_by_the_first_plan_and_it_stays(entry_points):
    rule = toy.gemm()
    entry_points(rule)
    chain, x, named = toy.experts(), toy.rows(), toy.inputs()
    chain(x, **named)
    (part,) = partition_for(chain).parts
    assert len(part.chain.table.plans) == 1
    chain(x, **named)
    assert len(part.chain.table.plans) == 1
    assert toy.rules_used(toy.only_plan(chain, x, **named)) == ["toy.gemm"] * 2


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def a_call():
    return toy.experts()(toy.rows(), **toy.inputs())


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ImportError("No module named 'kernels'"), "ImportError: No module named 'kernels'"),
        (ValueError("two\n  lines"), "ValueError: two lines"),
        (SystemExit(3), "SystemExit: 3"),
        (SystemExit(), "SystemExit"),
        (RecursionError("deep"), "RecursionError: deep"),
        (BaseException("a panic"), "BaseException: a panic"),
        (WordlessError(), WORDLESS),
    ],
    ids=repr,
)
def test_an_entry_point_that_fails_to_load_stops_nothing(entry_points, caplog, error, text):
    """Its package is named once, and the rules of others are used."""
    entry_points(toy.gemm(), error, toy.glu_scale("toy.act"))
    for _ in range(2):
        a_call()
    assert {r.name for r in fm.rules()} == {"toy.gemm", "toy.act"}
    assert toy.rules_used(toy.only_plan(toy.experts(), toy.rows(), **toy.inputs())) == [
        "toy.gemm",
        "toy.act",
        "toy.gemm",
    ]
    assert warnings(caplog)[:1] == [
        "the fusion rules of package a-package are not used: its entry point toys (a_package:rules) failed to load: "
        + text
    ]
    assert sum("a-package" in message for message in warnings(caplog)) == 1
    assert registry.broken_entry_points() == (("a-package", "toys", "a_package:rules", text),)


def test_an_entry_point_that_fails_does_not_keep_rules_from_being_switched_off(entry_points, monkeypatch):
    entry_points(SystemExit(1), toy.gemm())
    monkeypatch.setenv("FUSEDMOE_DISABLE", "*")
    assert toy.rules_used(toy.only_plan(toy.experts(), toy.rows(), **toy.inputs())) == []


def test_an_interrupt_while_entry_points_load_passes_through(entry_points):
    """The next call loads them."""
    entry_points(toy.gemm("toy.a"), KeyboardInterrupt(), toy.gemm_glu("toy.b"))
    with pytest.raises(KeyboardInterrupt):
        fm.rules()
    Entry.interrupts = False
    try:
        assert [r.name for r in fm.rules()] == ["toy.a", "toy.b"]
    finally:
        Entry.interrupts = True


@pytest.mark.parametrize("loaded", [42, "rule", [42], {"a": 1}, None])
def test_an_entry_point_that_is_no_rule_is_named(entry_points, caplog, loaded):
    entry_points(loaded, toy.gemm("toy.a"))
    assert [r.name for r in fm.rules()] == ["toy.a"]
    (message,) = warnings(caplog)
    assert "a-package" in message
    assert "expected a subclass of FusionRule" in message


def test_two_entry_points_with_the_same_name_of_a_rule(entry_points, caplog):
    a = toy.gemm("toy.a")
    entry_points(a, toy.gemm_glu("toy.a"))
    assert fm.rules() == (a,)
    (message,) = warnings(caplog)
    assert "a rule named 'toy.a' is registered already" in message


class Nameless:
    name = None  # as Python gives it where there is no METADATA


@pytest.mark.parametrize("dist", [None, Nameless()])
def test_an_entry_point_without_a_package(entry_points, caplog, monkeypatch, dist):
    monkeypatch.setattr(Entry, "dist", dist)
    entry_points(ValueError("bad"))
    assert fm.rules() == ()
    (message,) = warnings(caplog)
    assert "package (unknown)" in message


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("no driver"), "RuntimeError: no driver"),
        (SystemExit(4), "SystemExit: 4"),
        (WordlessError(), WORDLESS),
    ],
    ids=repr,
)
@pytest.mark.parametrize("method", ["available", "installed"])
def test_a_rule_that_fails_where_it_is_asked_is_unavailable(caplog, method, error, text):
    """The error came out of every call and named no rule; a SystemExit ended the process."""

    def fails(*_):
        raise error

    broken, reason = toy.gemm("toy.broken"), f"{method}() failed: {text}"
    setattr(broken, method, fails)
    with fm.register(broken, toy.gemm("toy.works")):
        a_call()
        plan = toy.only_plan(toy.experts(), toy.rows(), **toy.inputs())
        assert toy.rules_used(plan) == ["toy.works"] * 2
        (attempt, *_) = [a for a in plan.attempts if a.rule == "toy.broken" and a.status is Status.UNAVAILABLE]
        assert (attempt.reason, attempt.cause) == (reason, "machine")
        kernels = {kernel.name: kernel for kernel in doctor.doctor().kernels}
        assert kernels["toy.broken"] == doctor.Kernel("toy.broken", False, reason)
        assert kernels["toy.works"].available
    assert [m for m in warnings(caplog) if "toy.broken" in m] == [f"rule 'toy.broken' is not used: its {reason}"]


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuleError("wrong in itself")], ids=lambda error: type(error).__name__
)
def test_an_interrupt_and_a_rule_that_says_what_is_wrong_with_it_pass_through(error):
    def fails(*_):
        raise error

    broken = toy.gemm("toy.broken")
    broken.available = fails
    with fm.register(broken), pytest.raises(type(error)):
        a_call()
