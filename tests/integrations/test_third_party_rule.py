"""examples/third_party_rule, installed as its users would: found through its entry point, with the same results."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="builds the example's wheel; in the dev extra")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "third_party_rule"

COMPARE = """
import torch, fusedmoe as fm
from fusedmoe_softcap import Softcap

torch.manual_seed(0)
experts = fm.Sequential(fm.GroupedLinear(3, 8, 6), Softcap(0.5), fm.GroupedLinear(3, 6, 8)).double()
x, splits = torch.randn(9, 8, dtype=torch.float64, requires_grad=True), torch.tensor([3, 0, 4])

def call():
    y = experts(x, splits=splits)
    grads = torch.autograd.grad(y, [x, *experts.parameters()], torch.linspace(-1, 1, 72).double().view(9, 8))
    return [s.rule for s in experts.explain(x, splits=splits).steps if s.rule], [y.detach(), *grads]

used, got = call()
with fm.disabled("softcap.*"):
    unused, expected = call()
assert unused == []
for a, b in zip(got, expected, strict=True):
    torch.testing.assert_close(a, b)
    assert a.abs().sum() > 0
assert torch.autograd.gradcheck(lambda x, *w: experts(x, splits=splits), [x])
print("rules:", *used)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the example installed in it."""
    target = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "third_party_rule"
    # a copy, so that no build leaves anything in the checkout
    source.mkdir()
    (source / "fusedmoe_softcap").mkdir()
    for file in [*EXAMPLE.glob("*.*"), *(EXAMPLE / "fusedmoe_softcap").glob("*.py")]:
        (source / file.relative_to(EXAMPLE)).write_bytes(file.read_bytes())
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--disable-pip-version-check", "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return target


def run(arguments, *path):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FUSEDMOE_")}
    clean["PYTHONPATH"] = os.pathsep.join(map(str, [*path, ROOT]))
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=200, check=False, cwd=path[0])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_installed_rules_fuse_with_the_same_results(site):
    assert run(["-W", "error", "-c", COMPARE], site) == "rules: softcap.gemm_softcap softcap.dgrad_dsoftcap\n"
