"""Which of the CuTe DSL's CUDA libraries is used, on machines that the test makes up: no GPU, no driver, no DSL."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

import fusedmoe as fm
from fusedmoe.commands import doctor
from fusedmoe.kernels.build import toolkit

LIBS = "nvidia-cutlass-dsl-libs-cu{}"


def forget():
    toolkit.driver_cuda.cache_clear()
    toolkit.why_unusable.cache_clear()


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

    forget()
    yield make
    monkeypatch.undo()
    forget()


BOTH = {"cu12": "4.8.1", "cu13": "4.8.1"}
OF_13 = "nvidia-cutlass-dsl has libraries for CUDA 13, and the driver supports CUDA"
PIP = "pip install nvidia-cutlass-dsl-libs-cu{}==4.8.1"


@pytest.mark.parametrize(
    ("installed", "known", "chosen", "unusable", "reported"),
    [
        (BOTH, None, 13, None, "cu12 4.8.1, cu13 4.8.1; cu13 is used"),
        (BOTH | {"driver": 12090}, (12, 9), 12, None, "cu12 4.8.1, cu13 4.8.1; cu12 is used"),
        # as `pip install .` leaves it: torch for CUDA 13, the DSL for CUDA 12
        ({"cu12": "4.8.1", "driver": 13020, "cuda": "13.2"}, (13, 2), 12, None,
         "cu12 4.8.1; torch has CUDA 13.2, which is compatible"),
        (BOTH | {"driver": 13020, "cuda": "12.8"}, (13, 2), 13, None,
         "cu12 4.8.1, cu13 4.8.1; cu13 is used; torch has CUDA 12.8, which is compatible"),
        ({"cu13": "4.8.1", "driver": 12080}, (12, 8), None, f"{OF_13} 12.8: {PIP.format(12)}, or update the driver",
         f"unusable: {OF_13} 12.8: {PIP.format(12)}, or update the driver"),
        ({"cu12": "4.8.1", "driver": 11080}, (11, 8), None,
         f"{OF_13.replace('13', '12')} 11.8: update the driver", "unusable: "),
        # as `pip install --no-deps nvidia-cutlass-dsl` leaves it: the package can be found, and cannot be imported
        ({}, None, None, f"nvidia-cutlass-dsl 4.8.1 lacks its libraries: {PIP.format(12)}", "unusable: "),
        ({"cu12": "4.8.1", "cu13": "4.8.0"}, None, 13, None, "cu12 4.8.1, cu13 4.8.0; cu13 is used; their version"),
        ({"dsl": None}, None, None, None, None),
    ],
)  # fmt: skip
def test_libraries(installed, known, chosen, unusable, reported, machine):
    machine(**installed)
    assert (toolkit.driver_cuda(), toolkit.chosen(), toolkit.why_unusable()) == (known, chosen, unusable)
    found = {fact.name: fact.value for fact in doctor.doctor().packages}.get("its CUDA libraries")
    assert found is None if reported is None else found.startswith(reported)
    if installed.get("cuda") == "13.2":
        assert "pip install 'fusedmoe[cu13]'" in found
    if installed.get("cu13") == "4.8.0":
        assert found.endswith(f"their version is not that of nvidia-cutlass-dsl: {PIP.format(13)}")


@pytest.mark.usefixtures("builtin_rules")
def test_a_plan_is_not_fused_with_libraries_that_cannot_be_loaded(machine, monkeypatch):
    machine(cu13="4.8.1", driver=12080)
    monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: 90)
    monkeypatch.setattr("fusedmoe.kernels.build.toolkit.missing_packages", lambda: ())
    chain = fm.Sequential(fm.GroupedLinear(2, 16, 16), fm.SquaredReLU()).bfloat16()
    plan = chain.explain(torch.ones(4, 16, dtype=torch.bfloat16), splits=torch.tensor([1, 3]))
    assert not any(step.rule for step in plan.steps)
    assert f"the driver supports CUDA 12.8: {PIP.format(12)}" in " ".join(str(plan).split())
