"""Ways into ``fp8_block`` run the fused FP8 kernels: transformers, FP8 checkpoints, FSDP2, and the demo."""

import copy
import json
import re

import pytest
import torch
from kit.fp8_layers import (
    BF16,
    EMULATED,
    RECIPES,
    count_quantized_weights,
    kernels,
    moe,
    tokens,
)
from kit.hopper import needs_gpu, needs_hopper
from kit.training import assert_equal, outcome
from torch import distributed as dist

import fusedmoe as fm
from benchmarks import demo

pytestmark = needs_hopper

EACH = pytest.mark.parametrize("recipe", RECIPES)


@pytest.fixture(scope="module", autouse=True)
def built(build_ahead):
    build_ahead(kernels)


# ------------------------------------------------------------------------------------------------------ transformers

# ------------------------------------------------------------------------------------------------------------- FSDP2


@pytest.fixture
def mesh():
    if EMULATED:
        backend, device = "gloo", "cpu"
    else:
        if not dist.is_nccl_available():
            pytest.skip("torch is built without NCCL")
        torch.cuda.set_device(0)
        backend, device = "nccl", "cuda"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.init_device_mesh(device, (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # those of NCCL
@pytest.mark.parametrize("reshard", [True, False], ids=["resharded after forward", "kept for backward"])
@EACH
def test_sharded_layers_have_the_same_gradients(recipe, reshard, mesh, monkeypatch):
    """Parameters in fp32 that are gathered in bf16; each time, the gathered weight is quantized."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    whole, (x, dy) = moe(), tokens()
    layer = copy.deepcopy(whole).float()
    policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    fsdp.fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    counted = count_quantized_weights(monkeypatch)
    for _ in range(2):
        with fm.recipe(recipe), fm.strict():
            want = outcome(whole, x, dy)
            launches = len(counted)
            leaf = x.detach().requires_grad_()
            y = layer(leaf)
            y.backward(dy)
        assert len(counted) >= launches + 2, "each gathered weight is quantized"
        got = {"y": y.detach(), "x": leaf.grad}
        got |= {name: p.grad.full_tensor() for name, p in layer.named_parameters()}
        assert_equal(got, {name: t if name in ("y", "x") else t.float() for name, t in want.items()})
        assert fm.weight_cache_bytes(layer) == 0 or not reshard
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, q in zip(whole.parameters(), layer.parameters(), strict=True):
                p.copy_(q.full_tensor())


# ---------------------------------------------------------------------------------------------------------- the demo


@needs_gpu
def test_the_demo_compares_recipes_with_every_step_fused(tmp_path, capsys):
    sizes = {"layers": 1, "hidden": 256, "intermediate": 128, "heads": 4, "experts": 8, "context": 128, "batch": 8}
    options = [f"--{name}={value}" for name, value in (sizes | {"steps": 40, "top-k": 2}).items()]
    with fm.strict():
        demo.main([",".join(["bf16", *RECIPES]), *options, "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    of_recipes = re.split(r"^Recipe \d of 3: .*$", printed, flags=re.MULTILINE)[1:]
    products = [set(re.findall(r"sm90\.fp8_grouped_\w+", part)) for part in of_recipes]
    both = {f"sm90.fp8_grouped_{name}" for name in ("gemm_activation", "gemm", "dgrad_activation", "dgrad")}
    assert products == [set(), both | {"sm90.fp8_grouped_wgrad"}, both]
    assert "unfused" not in printed
    compared = json.loads((tmp_path / "compare.json").read_text())
    assert compared["machine"] == torch.cuda.get_device_name()
    runs = {run["recipe"]: run for run in compared["runs"]}
    assert list(runs) == ["bf16", *RECIPES]
    for run in runs.values():
        (_, first), *_, (_, last) = run["evaluations"]
        assert last < first < 8
        assert abs(run["gap_percent"]) < 3
    assert len({run["held_out_bits_per_byte"] for run in runs.values()}) == 3
    for recipe in RECIPES:
        assert re.search(rf"^\| `{re.escape(recipe)}` \| [\d.]+ \| [+-][\d.]+ %", printed, re.MULTILINE), printed
