"""The machines on which the rules for Blackwell are unavailable: other devices, missing packages, no verification."""

import json
import sys
from importlib import metadata

import pytest
import torch
from kit.sm100_machine import (
    BF16,
    DGRAD,
    DGRAD_ACTIVATION,
    DGRAD_DDISPATCH,
    GATHERED_QUANTIZE,
    GATHERED_QUANTIZE_GRAD,
    GEMM,
    GEMM_ACTIVATION,
    GEMM_COMBINE,
    PREFIX,
    QUANTIZE,
    QUANTIZE_GRAD,
    QUANTIZE_WEIGHT,
    WGRAD,
    E,
    H,
    I,
    blackwell_machine,  # noqa: F401  (a fixture)
    experts,
    inputs,
    tokens,
)
from kit.toy import only_plan, outcome, rules_used

import fusedmoe as fm
from fusedmoe import Status
from fusedmoe.kernels.build import toolkit
from fusedmoe.kernels.sm100 import package

pytestmark = pytest.mark.usefixtures("builtin_rules", "blackwell_machine")

PRODUCTS = (GEMM_COMBINE, GEMM_ACTIVATION, DGRAD_DDISPATCH, DGRAD_ACTIVATION, WGRAD)  # of a layer
ALL = (*PRODUCTS, QUANTIZE, QUANTIZE_GRAD, GATHERED_QUANTIZE, GATHERED_QUANTIZE_GRAD)
WHY_MISSING, WHY_UNVERIFIED = package.why_missing.__wrapped__, package.why_unverified  # the former not cached
VERIFY = "run `fusedmoe verify`"


def used(plan):
    return {name for name in rules_used(plan) if name.startswith(PREFIX)}


@pytest.fixture
def layer_plan():
    """Returns the plan of a layer, whose rules are all that there are for Blackwell."""

    def plan():
        with fm.recipe("mxfp8"):
            return only_plan(fm.MoE(H, I, E, 2, dtype=BF16), torch.randn(9, H, dtype=BF16, requires_grad=True))

    return plan


def assert_unavailable(plan, reason):
    assert not used(plan)
    for rule in ALL:
        found = {a.reason for a in plan.attempts if a.rule == rule and a.status is Status.UNAVAILABLE}
        assert found == {reason}, rule


@pytest.mark.parametrize(
    ("arch", "reason"),
    [
        (None, "needs an sm_100 GPU, this device is cpu"),
        (90, "needs an sm_100 or sm_103 GPU, this one is sm_90"),
        (120, "needs an sm_100 or sm_103 GPU, this one is sm_120"),
    ],
)
def test_other_devices(arch, reason, layer_plan, monkeypatch):
    monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: arch)
    assert_unavailable(layer_plan(), reason)


def test_sm_103(layer_plan, monkeypatch):
    monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: 103)
    assert {*PRODUCTS} <= used(layer_plan())


def test_other_operating_systems(layer_plan, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert_unavailable(layer_plan(), "needs Linux, this is darwin")


def test_a_dsl_that_cannot_be_imported(layer_plan, monkeypatch):
    monkeypatch.setattr(toolkit, "why_unusable", lambda: "needs a newer driver")
    assert_unavailable(layer_plan(), "needs a newer driver")


def test_packages_that_the_kernels_are_compiled_with(layer_plan, monkeypatch):
    monkeypatch.setattr(toolkit, "missing_packages", lambda: ("a", "b"))
    assert_unavailable(layer_plan(), "needs a and b: pip install a b")


def installed(monkeypatch, version):
    """As if this version of NVIDIA's package were installed; none for None."""

    def found(name):
        if name == package.DISTRIBUTION:
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version
        return "1.0"

    monkeypatch.setattr(package.metadata, "version", found)
    monkeypatch.setattr(package, "why_missing", WHY_MISSING)


INSTALL = "pip install 'fusedmoe[blackwell]' (in a checkout: pip install '.[blackwell]')"


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, f"needs nvidia-cudnn-frontend 1.32: {INSTALL}"),
        ("1.31.9", f"needs nvidia-cudnn-frontend 1.32, found 1.31.9: {INSTALL}"),
        ("1.33.0", f"needs nvidia-cudnn-frontend 1.32, found 1.33.0: {INSTALL}"),
        ("2.32.0", f"needs nvidia-cudnn-frontend 1.32, found 2.32.0: {INSTALL}"),
    ],
)
def test_other_versions_of_the_package(version, reason, layer_plan, monkeypatch):
    installed(monkeypatch, version)
    assert_unavailable(layer_plan(), reason)


def test_later_fixes_of_the_package(layer_plan, monkeypatch):
    installed(monkeypatch, "1.32.7")
    assert {*PRODUCTS} <= used(layer_plan())


# ------------------------------------------------------------------------------------------------------------- stamps


@pytest.fixture
def stamp(monkeypatch, tmp_path):
    """Returns a function that writes a stamp, and its path. Nothing is verified before."""
    monkeypatch.setenv("FUSEDMOE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(package, "why_unverified", WHY_UNVERIFIED)
    monkeypatch.setattr(package, "machine_architectures", lambda: (100,))
    monkeypatch.setattr(package, "_why_not_stamped", package._why_not_stamped.__wrapped__)  # not cached
    path = package.stamp_file(100)

    def write(text):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text if isinstance(text, str) else json.dumps({"architecture": "sm_100", **text}))

    return write, path


def test_a_machine_that_was_not_verified(stamp, layer_plan):
    assert_unavailable(layer_plan(), f"not verified on this machine: {VERIFY}")


def test_a_verified_machine(stamp, layer_plan):
    write, _ = stamp
    write({"versions": package.versions(), "passed": True})
    assert {*PRODUCTS} <= used(layer_plan())


def test_a_failed_verification(stamp, layer_plan):
    write, path = stamp
    write({"versions": package.versions(), "passed": False})
    assert_unavailable(layer_plan(), f"`fusedmoe verify` failed or did not finish on this machine: {path}")


@pytest.mark.parametrize("name", package._VERSIONS)
def test_a_verification_of_other_versions(name, stamp, layer_plan):
    write, _ = stamp
    write({"versions": {**package.versions(), name: "0.1"}, "passed": True})
    now = package.versions()[name]
    assert_unavailable(layer_plan(), f"not verified on this machine since {name} 0.1 -> {now}: {VERIFY}")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "1", "{}", '{"passed": true}', '{"versions": {}}', '{"versions": 1, "passed": true}',
     '{"versions": ["a"], "passed": true}'],
)  # fmt: skip
def test_an_unreadable_stamp(text, stamp):
    write, path = stamp
    write(text)
    reason = WHY_UNVERIFIED()
    assert reason.startswith(f"not verified on this machine: {path} is unreadable (")
    assert reason.endswith(f"): {VERIFY}")


def test_a_stamp_without_versions(stamp):
    write, _ = stamp
    write({"versions": {}, "passed": True})
    assert "since fusedmoe None -> " in WHY_UNVERIFIED()


@pytest.mark.parametrize("folder", ["0", "untrusted"])
def test_no_cache_directory_for_the_stamp(folder, stamp, monkeypatch, tmp_path):
    directory = tmp_path / folder
    directory.mkdir(mode=0o777)
    directory.chmod(0o777)
    monkeypatch.setenv("FUSEDMOE_CACHE_DIR", "0" if folder == "0" else str(directory))
    reason = f"not verified on this machine: {VERIFY}, with a cache directory (FUSEDMOE_CACHE_DIR) for its result"
    assert WHY_UNVERIFIED() == reason


def test_a_plan_for_a_machine_that_is_absent(stamp, monkeypatch):
    """It assumes a verified machine, and says so."""
    monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: None)
    with fm.recipe("mxfp8"):
        found = experts().explain(tokens(), arch=100, **inputs())
    products = {GEMM, GEMM_ACTIVATION, DGRAD, DGRAD_ACTIVATION, WGRAD}
    assert used(found.plans[0]) == {*products, QUANTIZE, QUANTIZE_GRAD, QUANTIZE_WEIGHT}
    assert f"not available on this machine, but assumed: not verified on this machine: {VERIFY}" in str(found)


def test_unverified_kernels_are_not_called(stamp):
    chain, x, named = experts(), tokens(), inputs()
    with fm.recipe("mxfp8"):
        got = outcome(chain, x, **named)
        fm.clear_weight_cache(chain)
        with fm.disabled("*"):
            want = outcome(chain, x, **named)
    assert want["y"].any()
    assert all(torch.equal(got[name], t) for name, t in want.items())
