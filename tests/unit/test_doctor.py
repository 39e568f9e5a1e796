"""The doctor's report, on machines that it is told about: no test here needs a GPU."""

import json
from types import SimpleNamespace

import pytest
import torch

from fusedmoe.builtin_rules import BUILTIN
from fusedmoe.commands import doctor as module
from fusedmoe.commands.main import main


@pytest.fixture
def machine(monkeypatch):
    """A machine with a CUDA build of torch and the GPUs that the test names, by compute capability."""

    def make(*capabilities, init=lambda: None):
        memory = {"total_memory": 80 * 2**30, "multi_processor_count": 132}
        devices = [
            SimpleNamespace(name=f"GPU {i}", major=major, minor=minor, **memory)
            for i, (major, minor) in enumerate(capabilities)
        ]
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
        monkeypatch.setattr(torch.cuda, "get_device_properties", devices.__getitem__)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(
            module, "runs_on_device", lambda device, dtype: devices[device.index].major == 9 and dtype is torch.bfloat16
        )
        monkeypatch.setattr(module, "multiplies_codes", lambda device: devices[device.index].major == 9)

    return make


def values(facts):
    return {fact.name: fact.value for fact in facts}


def test_each_gpu_is_listed_and_each_architecture_once(machine):
    machine((9, 0), (9, 0), (8, 0))
    report = module.doctor()
    found = [(gpu.index, gpu.arch, gpu.memory_gib, gpu.sms) for gpu in report.gpus]
    assert found == [(0, "sm_90", 80.0, 132), (1, "sm_90", 80.0, 132), (2, "sm_80", 80.0, 132)]
    assert {kernel.name: kernel.available for kernel in report.kernels} == {
        "torch grouped GEMM, cpu": True,
        "torch grouped GEMM, sm_80": False,
        "torch FP8 grouped GEMM, sm_80": False,
        "torch grouped GEMM, sm_90": True,
        "torch FP8 grouped GEMM, sm_90": True,
        "fused kernels": False,
    }


@pytest.mark.usefixtures("builtin_rules")
def test_every_built_in_rule_is_listed(machine, monkeypatch):
    monkeypatch.setattr(module, "arch_of", lambda device: 90)
    monkeypatch.setattr("fusedmoe.kernels.build.toolkit.missing_packages", lambda: ())
    machine((9, 0))
    kernels = {kernel.name: kernel for kernel in module.doctor().kernels if kernel.name.startswith("sm90.")}
    assert kernels.keys() == {rule.name for rule in BUILTIN if rule.name.startswith("sm90.")}
    assert all(kernel.available for kernel in kernels.values())
    assert kernels["sm90.grouped_wgrad"].note == "backward, a fusion rule"
    monkeypatch.setattr(module, "arch_of", lambda device: 100)
    others = {(k.available, k.note) for k in module.doctor().kernels if k.name.startswith("sm90.")}
    assert others == {(False, "needs an sm_90 GPU, this one is sm_100")}


def too_old():
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")


@pytest.mark.parametrize(
    ("capabilities", "init", "said"),
    [
        ((), lambda: None, "torch sees no device: check the driver and CUDA_VISIBLE_DEVICES"),
        (((9, 0),), too_old, "The NVIDIA driver on your system is too old (found version 11040)."),
    ],
    ids=["no device", "driver"],
)
def test_no_gpu(machine, capabilities, init, said):
    machine(*capabilities, init=init)
    report = module.doctor()
    assert (report.gpus, report.no_gpu) == ((), said)


@pytest.mark.parametrize(("tool", "said"), [("true", "nvidia-smi lists no GPU"), ("false", "nvidia-smi failed: ")])
def test_driver_version_of_nvidia_smi(monkeypatch, tool, said):
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/usr/bin/{tool}")
    assert module.driver().startswith(said)


def test_missing_package_names_the_extra_that_brings_it(monkeypatch):
    def version(name):
        raise module.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module.metadata, "version", version)
    packages = values(module.doctor().packages)
    missing = "not installed: pip install 'fusedmoe[te]' (in a checkout: pip install '.[te]')"
    assert (packages["transformer-engine"], packages["apache-tvm-ffi"]) == (missing, "not installed")


def test_text_and_json(capsys, machine, monkeypatch):
    machine((9, 0))
    monkeypatch.setenv("FUSEDMOE_DISABLE", "sm100.*")
    broken = SimpleNamespace(package="rules-x", name="some", value="rules_x:RULES", error="ImportError: none")
    monkeypatch.setattr(module.registry, "broken_entry_points", lambda: (broken,))
    assert main(["doctor"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        f"torch {torch.__version__}",
        "FUSEDMOE_DISABLE 'sm100.*'",
        "0: GPU 0 sm_90, 80.0 GiB, 132 SMs",
        "packages whose fusion rules are not used",
        "rules-x entry point some (rules_x:RULES) failed to load: ImportError: none",
    ):
        assert line in lines
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["gpus"][0]["arch"] == "sm_90"
    assert [entry["name"] for entry in report["broken_entry_points"]] == ["rules-x"]
    assert [kernel["available"] for kernel in report["kernels"]] == [True, True, True, False]
