"""Which rules there are: registered ones, those of entry points, and what is wrong with either."""

import contextlib
import traceback

import pytest
from kit import toy

import fusedmoe as fm
from fusedmoe.commands import doctor
from fusedmoe.fusion.language import registry
from fusedmoe.fusion.language.rule import RuleError
from fusedmoe.fusion.report.data import Status


def names():
    return [rule.name for rule in fm.rules()]


def a_plan():
    return toy.only_plan(toy.experts(), toy.rows(), **toy.inputs())


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_registration_holds_for_a_block_or_until_it_is_removed():
    a, b, before = toy.gemm("toy.a"), toy.gemm("toy.b"), fm.rules()
    generations = [registry.generation()]
    with contextlib.suppress(KeyError), fm.register(b, a):
        assert [rule for rule in fm.rules() if rule not in before] == [a, b]  # by name
        generations.append(registry.generation())
        raise KeyError
    assert fm.rules() == before
    generations.append(registry.generation())
    assert len(set(generations)) == 3
    registration = fm.register(a)
    with fm.register(a):  # twice, until the first is removed
        pass
    assert a in fm.rules()
    registration.remove()
    assert a not in fm.rules()
    registration.remove()  # twice does nothing


def test_a_refused_registration_registers_nothing():
    with fm.register(toy.gemm("toy.a")):
        before = fm.rules()
        for wrong in (3, fm.SwiGLU, toy.gemm()({"fc": None})):
            with pytest.raises(RuleError, match="expected a subclass of FusionRule, got"):
                fm.register(toy.gemm("toy.b"), wrong)
        with pytest.raises(RuleError, match=r"a rule named 'toy\.a' is registered already"):
            fm.register(toy.gemm("toy.b"), toy.gemm_glu("toy.a"))
        assert fm.rules() == before


# ---- entry points -------------------------------------------------------------------------------------------------


class WordlessError(Exception):
    def __str__(self):
        raise ValueError("no text")


WORDLESS = "".join(traceback.format_exception_only(WordlessError())).strip()


class Dist:
    def __init__(self, name):
        self.name = name


class Entry:
    """An entry point that gives a value, or raises it once."""

    name, value, dist = "toys", "a_package:rules", Dist("a-package")

    def __init__(self, loaded):
        self.loaded = loaded

    def load(self):
        loaded = self.loaded
        if isinstance(loaded, BaseException):
            self.loaded = []
            raise loaded
        return loaded


@pytest.fixture
def entry_points():
    """A process whose rules are not loaded yet, with these entry points."""

    def install(*loaded):
        monkeypatch.setattr(registry, "_registry", registry._Registry())
        found = [Entry(value) for value in loaded]
        monkeypatch.setattr(registry, "entry_points", lambda group: found if group == "fusedmoe.fusions" else [])

    with pytest.MonkeyPatch.context() as monkeypatch:
        yield install


def test_entry_points_give_a_rule_or_several_before_the_first_plan(entry_points):
    a, b, c = (toy.glu_scale(f"toy.{n}", launches=1 + (n != "b")) for n in "abc")
    entry_points([b, c], a)
    assert toy.rules_used(a_plan()) == ["toy.b"]
    assert fm.rules() == (a, b, c)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("two\n  lines"), "ValueError: two lines"),
        (SystemExit(), "SystemExit"),
        (WordlessError(), WORDLESS),
    ],
    ids=repr,
)
def test_an_entry_point_that_fails_to_load_stops_nothing(entry_points, caplog, monkeypatch, error, text):
    """Its package is named once; the rules of others are used, and can be switched off."""
    entry_points(toy.gemm(), error, toy.glu_scale("toy.act"))
    for _ in range(2):
        assert toy.rules_used(a_plan()) == ["toy.gemm", "toy.act", "toy.gemm"]
    (message,) = [m for m in warnings(caplog) if "a-package" in m]
    assert message.endswith(f"its entry point toys (a_package:rules) failed to load: {text}")
    assert registry.broken_entry_points() == (("a-package", "toys", "a_package:rules", text),)
    monkeypatch.setenv("FUSEDMOE_DISABLE", "*")
    assert toy.rules_used(a_plan()) == []


def test_an_interrupt_while_entry_points_load_passes_through(entry_points):
    """The next call loads them."""
    entry_points(toy.gemm("toy.a"), KeyboardInterrupt(), toy.gemm_glu("toy.b"))
    with pytest.raises(KeyboardInterrupt):
        fm.rules()
    assert names() == ["toy.a", "toy.b"]


@pytest.mark.parametrize("loaded", [[42], None, toy.gemm_glu("toy.a")], ids=str)
def test_an_entry_point_that_gives_no_new_rule_is_named(entry_points, caplog, loaded):
    entry_points(toy.gemm("toy.a"), loaded)
    assert names() == ["toy.a"]
    (message,) = warnings(caplog)
    assert "a-package" in message


# ---- rules that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "error", "text"),
    [
        ("available", SystemExit(4), "SystemExit: 4"),
        ("installed", WordlessError(), WORDLESS),
    ],
)
def test_a_rule_that_fails_where_it_is_asked_is_unavailable(caplog, method, error, text):
    def fails(*_):
        raise error

    broken, reason = toy.gemm("toy.broken"), f"{method}() failed: {text}"
    setattr(broken, method, fails)
    with fm.register(broken, toy.gemm("toy.works")):
        toy.experts()(toy.rows(), **toy.inputs())
        plan = a_plan()
        assert toy.rules_used(plan) == ["toy.works"] * 2
        (attempt, *_) = [a for a in plan.attempts if a.rule == "toy.broken" and a.status is Status.UNAVAILABLE]
        assert (attempt.reason, attempt.cause) == (reason, "machine")
        kernels = {kernel.name: kernel for kernel in doctor.doctor().kernels}
        assert kernels["toy.broken"] == doctor.Kernel("toy.broken", False, reason)
        assert kernels["toy.works"].available
    assert [m for m in warnings(caplog) if "toy.broken" in m] == [f"rule 'toy.broken' is not used: its {reason}"]
