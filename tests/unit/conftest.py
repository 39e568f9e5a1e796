"""What every test here starts from: nothing said yet, no rules, one thread."""

import pytest
import torch

import fusedmoe as fm
from fusedmoe.base.log import forget_said
from fusedmoe.builtin_rules import BUILTIN
from fusedmoe.fusion.language import registry


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("FUSEDMOE_DISABLE", raising=False)
    monkeypatch.delenv("FUSEDMOE_DEBUG", raising=False)
    forget_said()
    loaded = {rule.name: rule for rule in registry.rules()}
    # the planner's tests bring rules of their own: what else there is must not change what they see
    before = registry._registry.by_name = {n: rule for n, rule in loaded.items() if rule not in BUILTIN}
    before = dict(before)
    torch.default_generator.manual_seed(0)  # of the CPU: all devices take 0.6 ms
    yield
    left, registry._registry.by_name = registry._registry.by_name, loaded
    assert left == before, "rules of a test are still registered"


@pytest.fixture
def builtin_rules():
    """The rules that fusedmoe comes with."""
    with fm.register(*BUILTIN):
        yield BUILTIN


@pytest.fixture
def hopper_machine(builtin_rules, monkeypatch):
    """The CPU says that it is an sm_90 GPU, whose kernels are the stand-ins."""
    from kit import sm90_stand_ins

    from fusedmoe.kernels.build import toolkit

    monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: 90)
    monkeypatch.setattr(toolkit, "missing_packages", lambda: ())
    sm90_stand_ins.install(monkeypatch.setattr, router=True)
    sm90_stand_ins.calls.clear()
