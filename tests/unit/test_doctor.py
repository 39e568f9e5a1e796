"""The doctor's report, on machines that it is told about: no test here needs a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fusedmoe
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
    assert report.no_gpu is None
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
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for title, first in (("environment", "FUSEDMOE_DISABLE 'sm100.*'"), ("GPUs", "0: GPU 0 sm_90, 80.0 GiB, 132 SMs")):
        assert " ".join(lines[lines.index(title) + 1].split()) == first
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["gpus"][0]["arch"] == "sm_90"
    assert {"name": "torch", "value": torch.__version__} in report["software"]
    assert [kernel["available"] for kernel in report["kernels"]] == [True, True, True, False]


@pytest.mark.slow
def test_packages_with_broken_rules_are_listed_and_everything_else_is_there(tmp_path):
    """A process of its own, with installed packages whose entry points fail; it does not import the CuTe DSL."""
    bodies = {"exits": "import sys; sys.exit('bye')", "imports": "import no_such_module", "counts": "RULES = 3"}
    for name, body in bodies.items():
        (tmp_path / f"rules_{name}.py").write_text(body)
        info = tmp_path / f"rules_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rules-{name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[fusedmoe.fusions]\nsome = rules_{name}:RULES\n")
    path = os.pathsep.join([str(tmp_path), str(Path(fusedmoe.__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": path, "FUSEDMOE_DISABLE": "*"}
    code = (
        "import sys; from fusedmoe.commands.main import main; main(['doctor', '--json']); main(['doctor']); "
        "sys.exit(any(name in sys.modules for name in ('cutlass', 'tvm_ffi')))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report, end = json.JSONDecoder().raw_decode(done.stdout)
    text = done.stdout[end:]
    broken = {entry["name"]: entry["value"] for entry in report["broken_entry_points"]}
    assert "packages whose fusion rules are not used\n" in text
    for name in bodies:
        said = f"the fusion rules of package rules-{name} are not used: its entry point some (rules_{name}:RULES)"
        assert said in done.stderr
        assert f"entry point some (rules_{name}:RULES) failed to load: " in broken[f"rules-{name}"]
        assert f"\n  rules-{name}" in text
    assert len(broken) == len(bodies)
    assert "sm90.grouped_gemm" in {kernel["name"] for kernel in report["kernels"]}
