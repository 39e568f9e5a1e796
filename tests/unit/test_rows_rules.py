"""The rules for Blackwell that run kernels without a matrix product: where they are available, and what they match."""

import pytest
import torch
from kit.sm90_machine import BF16
from kit.toy import only_plan

import fusedmoe as fm
from fusedmoe import Status
from fusedmoe.builtin_rules import BUILTIN, ROWS
from fusedmoe.builtin_rules.requirements import OnSm90, OnSm100
from fusedmoe.fusion.language.registry import why_unavailable
from fusedmoe.kernels.sm100 import package

pytestmark = pytest.mark.usefixtures("builtin_rules")

CUDA = torch.device("cuda")
UNVERIFIED = "not verified on this machine: run `fusedmoe verify`"
RULES = [rule for rule in BUILTIN if rule.name in {f"sm100.{neutral.name}" for neutral in ROWS}]
NAMES = {rule.name for rule in RULES}


@pytest.fixture
def verified(monkeypatch):
    """Set why the package is missing and why it is unverified."""

    def set_reasons(missing=None, unverified=None):
        monkeypatch.setattr(package, "why_missing", lambda: missing)
        monkeypatch.setattr(package, "why_unverified", lambda: unverified)

    return set_reasons


def test_each_is_one_rule_for_two_architectures(verified):
    """Their names, identities and requirements differ, and nothing else."""
    assert len(RULES) == len(ROWS) == 11
    verified()
    of_hopper = {rule.name: rule for rule in BUILTIN if rule.name.startswith("sm90.")}
    for rule in RULES:
        twin = of_hopper[rule.name.replace("sm100.", "sm90.")]
        assert issubclass(rule, OnSm100)
        assert issubclass(twin, OnSm90)
        assert rule.__bases__[1] is twin.__bases__[1]
        assert (rule.slots, rule.direction, rule.__doc__) == (twin.slots, twin.direction, twin.__doc__)
        assert rule.__module__ == twin.__module__
        assert rule.identity != twin.identity
        for arch in (100, 103):
            assert why_unavailable(rule, CUDA, arch, ()) is None
        for arch in (90, 120):
            reason = why_unavailable(rule, CUDA, arch, ()).reason
            assert reason == f"needs an sm_100 or sm_103 GPU, this one is sm_{arch}"
    for missing, wanted in (("needs a package", f"needs a package; {UNVERIFIED}"), (None, UNVERIFIED)):
        verified(missing, UNVERIFIED)
        assert {why_unavailable(rule, CUDA, 100, ()) for rule in RULES} == {(wanted, "machine")}


@pytest.mark.parametrize("arch", [100, 103])
def test_unverified_they_are_the_nearest_rules(arch, verified, monkeypatch):
    """Nearer than rules for Hopper, whose reasons name no remedy."""
    verified(unverified=UNVERIFIED)
    monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: arch)
    experts = fm.Sequential(
        fm.Dispatch(), fm.GroupedLinear(4, 64, 2 * 32, dtype=BF16, bias=True), fm.SwiGLU(), fm.Scale("probs"),
        fm.GroupedLinear(4, 32, 64, dtype=BF16, bias=True), fm.Combine(None),
    )  # fmt: skip
    named = {"expert_index": torch.randint(4, (6, 2)), "expert_weight": torch.ones(6, 2, requires_grad=True)}
    plan = only_plan(experts, torch.zeros(6, 64, dtype=BF16, requires_grad=True), **named)
    assert not plan.fused
    nearest = {step.nearest_miss.rule: step.nearest_miss for step in plan.unfused}
    assert nearest.keys() >= {f"sm100.{name}" for name in ("dispatch", "combine", "dcombine", "column_sums")}
    for rule in NAMES & nearest.keys():
        assert (nearest[rule].status, nearest[rule].reason) == (Status.UNAVAILABLE, UNVERIFIED)
