"""FLOP counters and memory estimators of torch, on values, on FakeTensors and on the meta device."""

import contextlib

import pytest
import torch
from kit.compare import assert_bitwise
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fusedmoe as fm
from fusedmoe.numerics.formats import Delayed
from fusedmoe.numerics.recipes import FP8Tensor

E, H, I, R = 4, 16, 8, 12  # noqa: E741  (experts, hidden, intermediate, rows)
SPLITS = [3, 0, 4, 2]  # the rows after the ninth belong to no expert
FORWARD = 2 * R * (H * 2 * I + I * H)
FIRST = 2 * R * H * 2 * I
# without CUDA in its build, torch makes no FakeTensor on a GPU that requires a gradient, not for torch.nn.Linear either
# autograd asks the driver for the device of a fake CUDA tensor, so that its gradients take a GPU
FAKE_DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def mlp(bias=False, dtype=torch.float32, device="cpu"):
    how = {"bias": bias, "dtype": dtype, "device": device}
    return fm.Sequential(fm.GroupedLinear(E, H, 2 * I, **how), fm.SwiGLU(), fm.GroupedLinear(E, I, H, **how))


def rows(dtype=torch.float32, device="cpu", requires_grad=True):
    return torch.randn(R, H, dtype=dtype, device=device, requires_grad=requires_grad)


def splits(device="cpu"):
    return torch.tensor(SPLITS, device=device)


def count(call):
    """FLOPs of the forward pass, and of the backward pass of what it returns."""
    with FlopCounterMode(display=False) as counter:
        y = call()
        forward = counter.get_total_flops()
        y.sum().backward()
    return forward, counter.get_total_flops() - forward


def of_mlp(dtype=torch.float32, bias=False):
    seq, x = mlp(bias, dtype), rows(dtype)
    return lambda: seq(x, splits=splits())


def of_moe():
    moe, x = fm.MoE(H, I, E, 2, shared_intermediate=I), rows()
    return lambda: moe(x)


def of_frozen(parameters, x):
    seq, x = mlp(), rows(requires_grad=x)
    seq.requires_grad_(parameters)
    return lambda: seq(x, splits=splits())


def of_checkpoint():
    call = of_mlp()
    return lambda: checkpoint(lambda _: call(), rows(), use_reentrant=False)


def of_op():
    op, x = fm.GroupedLinear(E, H, I, bias=True), rows()
    return lambda: op(x, splits=splits())


ROUTER = 2 * R * H * E
# the products over all rows, forward and backward
FLOPS = {
    "fp32": (of_mlp, FORWARD, 2 * FORWARD),
    "bf16 with biases": (lambda: of_mlp(torch.bfloat16, True), FORWARD, 2 * FORWARD),
    "rows without a gradient": (lambda: of_frozen(True, False), FORWARD, 2 * FORWARD - FIRST),
    "frozen": (lambda: of_frozen(False, True), FORWARD, FORWARD),
    "MoE": (of_moe, ROUTER + 3 * FORWARD, 2 * (ROUTER + 3 * FORWARD)),
    "op": (of_op, 2 * R * H * I, 4 * R * H * I),
    "checkpoint": (of_checkpoint, FORWARD, 3 * FORWARD),
}


@pytest.mark.parametrize(("make", "forward", "backward"), FLOPS.values(), ids=FLOPS)
def test_flops(make, forward, backward):
    assert count(make()) == (forward, backward)


def test_flops_on_the_meta_device_and_on_fake_tensors():
    fake = [(FakeTensorMode(), device) for device in FAKE_DEVICES]
    for context, device in [(contextlib.nullcontext(), "meta"), *fake]:
        with context:
            seq, x = mlp(True, device=device), rows(device=device)
            assert count(lambda: seq(x, splits=splits(device))) == (FORWARD, 2 * FORWARD)  # noqa: B023
            moe = fm.MoE(H, I, E, 2, device=device)
            expected = ROUTER + 2 * FORWARD
            assert count(lambda: moe(x)) == (expected, 2 * expected)  # noqa: B023


def kinds_of_run(module, x, inputs):
    """Shape and dtype of the result, and of every gradient by name."""
    y = module(x, **inputs)
    y.sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {name: (tuple(t.shape), t.dtype) for name, t in {"y": y, "x": x.grad, **gradients}.items()}, y


def modules(dtype=torch.float32, device="cpu"):
    how, given = {"dtype": dtype, "device": device}, {"splits": splits(device)}
    yield mlp(True, dtype, device), given
    yield fm.GroupedLinear(E, H, I, bias=True, **how), given
    yield fm.MoE(H, I, E, 2, shared_intermediate=I, **how), {}
    yield fm.MoE(H, I, E, 2, activation="squared_relu", bias=True, **how), {}
    yield fm.Sequential(nn.LayerNorm(H, **how), *mlp(False, dtype, device)), given


@pytest.mark.parametrize("where", ["meta", *(f"fake {device}" for device in FAKE_DEVICES)])
def test_results_and_gradients_without_values_have_the_shapes_and_dtypes_of_a_run(where):
    dtype = torch.bfloat16
    context, device = (contextlib.nullcontext(), where) if where == "meta" else (FakeTensorMode(), where.split()[1])
    real = [kinds_of_run(module, rows(dtype), inputs)[0] for module, inputs in modules(dtype)]
    with context:
        for (module, inputs), expected in zip(modules(dtype, device), real, strict=True):
            found, y = kinds_of_run(module, rows(dtype, device), inputs)
            assert found == expected
            assert isinstance(y, FakeTensor) is (where != "meta")
            assert y.device.type == device


@pytest.mark.parametrize("recipe", [FP8Tensor(delayed=Delayed()), "fp8_block", "nvfp4"])
@pytest.mark.parametrize("device", FAKE_DEVICES)
def test_recipes_on_fake_tensors(recipe, device):
    with FakeTensorMode(), fm.recipe(recipe):
        seq = fm.Sequential(
            fm.GroupedLinear(E, 128, 256, device=device), fm.SwiGLU(), fm.GroupedLinear(E, 128, 128, device=device)
        )
        x = torch.randn(R, 128, device=device, requires_grad=True)
        kinds, _ = kinds_of_run(seq, x, {"splits": splits(device)})
    assert kinds["x"] == ((R, 128), torch.float32)
    assert kinds["2.weight"] == ((E, 128, 128), torch.float32)


def test_fake_tensors_on_a_gpu_that_is_not_there():
    dtype = torch.bfloat16
    seq, how = mlp(dtype=dtype, device="meta").without_parameters(), {"dtype": dtype, "device": "cuda"}
    with FakeTensorMode(), FlopCounterMode(display=False) as counter, fm.strict(unavailable=True):
        weights = {"0.weight": torch.empty(E, 2 * I, H, **how), "2.weight": torch.empty(E, H, I, **how)}
        y = seq.forward_with(weights, rows(**how, requires_grad=False), splits=splits("cuda"))
    assert (tuple(y.shape), y.dtype, y.device.type) == ((R, H), dtype, "cuda")
    assert counter.get_total_flops() == FORWARD


def test_a_module_that_was_called_runs_on_fake_tensors_and_on_values_again():
    seq, x = mlp(), rows()
    expected = seq(x, splits=splits())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = seq(mode.from_tensor(x), splits=mode.from_tensor(splits()))
        assert isinstance(y, FakeTensor)
    assert_bitwise(seq(x, splits=splits()), expected)
