"""Which of the CuTe DSL's CUDA libraries is used, on machines that the test makes up: no GPU, no driver, no DSL."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import fusedmoe as fm
from fusedmoe.commands import doctor
from fusedmoe.kernels.build import toolkit

LIBS = "nvidia-cutlass-dsl-libs-cu{}"


@pytest.fixture
def machine(monkeypatch):
    """A machine with these versions of the DSL and of its libraries, a driver, and torch for a CUDA version."""

    def make(*, dsl="4.8.1", cu12=None, cu13=None, driver=None, cuda=None):
        versions = {"nvidia-cutlass-dsl": dsl, LIBS.format(12): cu12, LIBS.format(13): cu13}
        find = toolkit.metadata.version

        def version(name):
            if name not in versions:
                return find(name)
            if versions[name] is None:
                raise toolkit.metadata.PackageNotFoundError(name)
            return versions[name]

        def answer(pointer):
            pointer._obj.value = driver
            return 0

        def library(name):
            if driver is None:
                raise OSError("libcuda.so.1: cannot open shared object file")
            return SimpleNamespace(cuDriverGetVersion=answer)

        monkeypatch.setattr(toolkit.metadata, "version", version)
        monkeypatch.setattr(ctypes, "CDLL", library)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        forget()

    def forget():
        toolkit.driver_cuda.cache_clear()
        toolkit.why_unusable.cache_clear()

    forget()
    yield make
    monkeypatch.undo()
    forget()


def reported():
    return {fact.name: fact.value for fact in doctor.doctor().packages}.get("its CUDA libraries")


def test_without_a_driver_the_newest_is_chosen(machine):
    machine(cu12="4.8.1", cu13="4.8.1")
    assert (toolkit.driver_cuda(), toolkit.chosen(), toolkit.why_unusable()) == (None, 13, None)
    assert reported() == "cu12 4.8.1, cu13 4.8.1; cu13 is used"


@pytest.mark.parametrize(
    ("driver", "known", "chosen"), [(12090, (12, 9), 12), (13000, (13, 0), 13), (13020, (13, 2), 13)]
)
def test_the_newest_that_the_driver_knows_is_chosen(machine, driver, known, chosen):
    machine(cu12="4.8.1", cu13="4.8.1", driver=driver)
    assert (toolkit.driver_cuda(), toolkit.chosen(), toolkit.why_unusable()) == (known, chosen, None)


def test_the_default_beside_a_newer_torch_works_and_names_the_extra(machine):
    """As `pip install .` leaves it: torch for CUDA 13, the DSL for CUDA 12."""
    machine(cu12="4.8.1", driver=13020, cuda="13.2")
    assert toolkit.why_unusable() is None
    text = reported()
    assert text.startswith("cu12 4.8.1; torch has CUDA 13.2, which is compatible")
    assert "pip install 'fusedmoe[cu13]'" in text


def test_an_older_torch_needs_no_extra(machine):
    machine(cu12="4.8.1", cu13="4.8.1", driver=13020, cuda="12.8")
    assert reported() == "cu12 4.8.1, cu13 4.8.1; cu13 is used; torch has CUDA 12.8, which is compatible"
    machine(cu12="4.8.1", driver=12090, cuda="12.8")
    assert reported() == "cu12 4.8.1"


def test_libraries_newer_than_the_driver_are_unusable(machine):
    machine(cu13="4.8.1", driver=12080, cuda="12.8")
    remedy = "pip install nvidia-cutlass-dsl-libs-cu12==4.8.1, or update the driver"
    expected = f"nvidia-cutlass-dsl has libraries for CUDA 13, and the driver supports CUDA 12.8: {remedy}"
    assert (toolkit.chosen(), toolkit.why_unusable()) == (None, expected)
    assert reported() == f"unusable: {expected}"


def test_a_driver_that_no_libraries_are_for(machine):
    machine(cu12="4.8.1", driver=11080)
    assert toolkit.why_unusable().endswith("and the driver supports CUDA 11.8: update the driver")


def test_no_libraries(machine):
    """As `pip install --no-deps nvidia-cutlass-dsl` leaves it: the package can be found, and cannot be imported."""
    machine()
    assert toolkit.why_unusable() == (
        "nvidia-cutlass-dsl 4.8.1 lacks its libraries: pip install nvidia-cutlass-dsl-libs-cu12==4.8.1"
    )


def test_libraries_of_another_version(machine):
    machine(cu12="4.8.1", cu13="4.8.0")
    assert reported().endswith(
        "; their version is not that of nvidia-cutlass-dsl: pip install nvidia-cutlass-dsl-libs-cu13==4.8.1"
    )


def test_no_dsl(machine):
    machine(dsl=None)
    assert (toolkit.why_unusable(), reported()) == (None, None)


@pytest.mark.usefixtures("builtin_rules")
def test_a_plan_is_not_fused_with_libraries_that_cannot_be_loaded(machine, monkeypatch):
    machine(cu13="4.8.1", driver=12080)
    monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: 90)
    monkeypatch.setattr("fusedmoe.kernels.build.toolkit.missing_packages", lambda: ())
    chain = fm.Sequential(fm.GroupedLinear(2, 16, 16), fm.SquaredReLU()).bfloat16()
    plan = chain.explain(torch.ones(4, 16, dtype=torch.bfloat16), splits=torch.tensor([1, 3]))
    assert not any(step.rule for step in plan.steps)
    assert "the driver supports CUDA 12.8: pip install nvidia-cutlass-dsl-libs-cu12==4.8.1" in " ".join(
        str(plan).split()
    )


def test_it_imports_no_dsl():
    code = (
        "import sys; from fusedmoe.kernels.build import toolkit; toolkit.why_unusable(); "
        "sys.exit(any(name in sys.modules for name in ('cutlass', 'tvm_ffi')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
