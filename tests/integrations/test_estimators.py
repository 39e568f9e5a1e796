"""FLOP counters and memory estimators of torch, on values, on FakeTensors and on the meta device."""

import contextlib

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fusedmoe as fm
from fusedmoe.numerics.formats import Delayed
from fusedmoe.numerics.recipes import FP8Tensor

E, H, I, R = 4, 16, 8, 12  # noqa: E741  (experts, hidden, intermediate, rows)
SPLITS = [3, 0, 4, 2]  # the rows after the ninth belong to no expert
FORWARD = 2 * R * (H * 2 * I + I * H)
# without CUDA in its build, torch makes no FakeTensor on a GPU that requires a gradient, not for torch.nn.Linear either
# autograd asks the driver for the device of a fake CUDA tensor, so that its gradients take a GPU
FAKE_DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def mlp(bias=False, dtype=torch.float32, device="cpu"):
    return fm.Sequential(
        fm.GroupedLinear(E, H, 2 * I, bias=bias, dtype=dtype, device=device),
        fm.SwiGLU(),
        fm.GroupedLinear(E, I, H, bias=bias, dtype=dtype, device=device),
    )


def rows(dtype=torch.float32, device="cpu", **options):
    return torch.randn(R, H, dtype=dtype, device=device, **options)


def splits(device="cpu"):
    return torch.tensor(SPLITS, device=device)


def count(call):
    """FLOPs of the forward pass, and of the backward pass of what it returns."""
    with FlopCounterMode(display=False) as counter:
        y = call()
        forward = counter.get_total_flops()
        y.sum().backward()
    return forward, counter.get_total_flops() - forward


# ---- FLOPs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_flops_of_a_sequential_are_those_of_its_products_over_all_rows(dtype, bias):
    seq, x = mlp(bias, dtype), rows(dtype, requires_grad=True)
    assert count(lambda: seq(x, splits=splits())) == (FORWARD, 2 * FORWARD)


def test_a_gradient_that_nobody_wants_counts_nothing():
    seq = mlp()
    of_first = 2 * R * H * 2 * I
    assert count(lambda: seq(rows(), splits=splits())) == (FORWARD, 2 * FORWARD - of_first)
    seq.requires_grad_(False)
    assert count(lambda: seq(rows(requires_grad=True), splits=splits())) == (FORWARD, FORWARD)


@pytest.mark.parametrize("shared", [None, I], ids=["experts", "shared expert"])
def test_flops_of_a_moe_are_those_of_router_and_experts(shared):
    moe, x = fm.MoE(H, I, E, 2, shared_intermediate=shared), rows(requires_grad=True)
    expected = 2 * R * H * E + 2 * FORWARD + (FORWARD if shared else 0)  # two experts for each token
    assert count(lambda: moe(x)) == (expected, 2 * expected)


def test_flops_of_an_op_alone():
    op, x = fm.GroupedLinear(E, H, I, bias=True), rows(requires_grad=True)
    assert count(lambda: op(x, splits=splits())) == (2 * R * H * I, 4 * R * H * I)
    dense = fm.Linear(H, I)
    assert count(lambda: dense(x)) == (2 * R * H * I, 4 * R * H * I)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_counts_in_backward(reentrant):
    seq, x = mlp(), rows(requires_grad=True)
    call = lambda: checkpoint(lambda x: seq(x, splits=splits()), x, use_reentrant=reentrant)  # noqa: E731
    assert count(call) == (FORWARD, 3 * FORWARD)


def test_a_counter_around_the_backward_pass_alone():
    seq, x = mlp(), rows(requires_grad=True)
    y = seq(x, splits=splits()).sum()
    with FlopCounterMode(display=False) as counter:
        y.backward()
    assert counter.get_total_flops() == 2 * FORWARD


def test_flops_with_parameters_of_another_module():
    weights = {"0.weight": torch.randn(E, 2 * I, H, requires_grad=True), "2.weight": torch.randn(E, H, I)}
    nested = fm.Sequential(mlp().without_parameters())
    x = rows(requires_grad=True)
    expected = 2 * FORWARD - 2 * R * I * H  # the second weight has no gradient
    for seq, given in [(nested[0], weights), (nested, {f"0.{name}": w for name, w in weights.items()})]:
        assert count(lambda: seq.forward_with(given, x, splits=splits())) == (FORWARD, expected)  # noqa: B023


def test_a_counter_names_the_modules():
    seq = mlp()
    with FlopCounterMode(display=False) as counter:
        seq(rows(), splits=splits())
    counts = {name: sum(of.values()) for name, of in counter.get_flop_counts().items()}
    assert counts["Sequential.0"] == 2 * R * H * 2 * I
    assert counts["Sequential.2"] == 2 * R * I * H


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_counter_changes_no_result(dtype):
    seq, x = mlp(True, dtype), rows(dtype, requires_grad=True)
    found = []
    for context in (contextlib.nullcontext(), FlopCounterMode(display=False), contextlib.nullcontext()):
        seq.zero_grad()
        x.grad = None
        with context:
            y = seq(x, splits=splits())
            y.square().sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in seq.parameters())])
    for before, under, after in zip(*found, strict=True):
        assert before.abs().sum() > 0
        torch.testing.assert_close(under, before)
        torch.testing.assert_close(after, before)


def test_wrong_splits_are_an_error_under_a_counter():
    with FlopCounterMode(display=False), pytest.raises(fm.InputError, match="at least 0"):
        mlp()(rows(), splits=torch.tensor([3, -1, 4, 2]))


def test_flops_on_the_meta_device_and_on_fake_tensors():
    fake = [(FakeTensorMode(), device) for device in FAKE_DEVICES]
    for context, device in [(contextlib.nullcontext(), "meta"), *fake]:
        with context:
            seq, x = mlp(True, device=device), rows(device=device, requires_grad=True)
            assert count(lambda: seq(x, splits=splits(device))) == (FORWARD, 2 * FORWARD)  # noqa: B023
            moe = fm.MoE(H, I, E, 2, device=device)
            expected = 2 * R * H * E + 2 * FORWARD
            assert count(lambda: moe(x)) == (expected, 2 * expected)  # noqa: B023


# ---- shapes -------------------------------------------------------------------------------------------------------


def kinds_of_run(module, x, inputs):
    """Shape and dtype of the result, and of every gradient by name."""
    y = module(x, **inputs)
    y.sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {name: (tuple(t.shape), t.dtype) for name, t in {"y": y, "x": x.grad, **gradients}.items()}, y


def modules(dtype=torch.float32, device="cpu"):
    yield mlp(True, dtype, device), {"splits": splits(device)}
    yield fm.GroupedLinear(E, H, I, bias=True, dtype=dtype, device=device), {"splits": splits(device)}
    yield fm.MoE(H, I, E, 2, dtype=dtype, device=device, shared_intermediate=I), {}
    yield fm.MoE(H, I, E, 2, activation="squared_relu", bias=True, dtype=dtype, device=device), {}
    yield (
        fm.Sequential(nn.LayerNorm(H, dtype=dtype, device=device), *mlp(False, dtype, device)),
        {"splits": splits(device)},
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", ["meta", *(f"fake {device}" for device in FAKE_DEVICES)])
def test_results_and_gradients_without_values_have_the_shapes_and_dtypes_of_a_run(where, dtype):
    context, device = (contextlib.nullcontext(), where) if where == "meta" else (FakeTensorMode(), where.split()[1])
    real = [kinds_of_run(module, rows(dtype, requires_grad=True), inputs)[0] for module, inputs in modules(dtype)]
    with context:
        for (module, inputs), expected in zip(modules(dtype, device), real, strict=True):
            found, y = kinds_of_run(module, rows(dtype, device, requires_grad=True), inputs)
            assert found == expected
            assert isinstance(y, FakeTensor) is (where != "meta")
            assert y.device.type == device


def test_fake_tensors_outside_of_their_mode():
    with FakeTensorMode():
        seq, x, given = mlp(), rows(requires_grad=True), splits()
    kinds, y = kinds_of_run(seq, x, {"splits": given})
    assert isinstance(y, FakeTensor)
    assert kinds["0.weight"] == ((E, 2 * I, H), torch.float32)


def test_a_module_that_was_called_runs_on_fake_tensors_and_on_values_again():
    seq, x = mlp(), rows(requires_grad=True)
    expected = seq(x, splits=splits())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = seq(mode.from_tensor(x), splits=mode.from_tensor(splits()))
        assert isinstance(y, FakeTensor)
    assert torch.equal(seq(x, splits=splits()), expected)


DELAYED = FP8Tensor(delayed=Delayed())


@pytest.mark.parametrize("recipe", ["fp8_tensor", DELAYED, "fp8_row", "fp8_block", "mxfp8", "nvfp4"])
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fake_tensors_on_a_gpu_that_is_not_there(dtype):
    seq = mlp(dtype=dtype, device="meta").without_parameters()
    with FakeTensorMode(), FlopCounterMode(display=False) as counter, fm.strict(unavailable=True):
        weights = {
            "0.weight": torch.empty(E, 2 * I, H, dtype=dtype, device="cuda"),
            "2.weight": torch.empty(E, H, I, dtype=dtype, device="cuda"),
        }
        y = seq.forward_with(weights, rows(dtype, "cuda"), splits=splits("cuda"))
    assert (tuple(y.shape), y.dtype, y.device.type) == ((R, H), dtype, "cuda")
    assert counter.get_total_flops() == FORWARD


# ---- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fake", [False, True], ids=["values", "fake"])
@pytest.mark.parametrize("make", [mlp, lambda: fm.MoE(H, I, E, 2)], ids=["Sequential", "MoE"])
def test_a_memory_tracker_sees_parameters_and_gradients(make, fake):
    with FakeTensorMode() if fake else contextlib.nullcontext():
        module, x = make(), rows(requires_grad=True)
        inputs = {"splits": splits()} if isinstance(module, fm.Sequential) else {}
        tracker = MemTracker()
        tracker.track_external(module, x)
        with tracker:
            module(x, **inputs).sum().backward()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    nbytes = sum(p.nbytes for p in module.parameters())
    found = {getattr(kind, "value", kind): size for kind, size in peak.items()}
    assert found["Parameter"] == nbytes
    assert found["Total"] > 2 * nbytes  # with their gradients, and what is kept for backward
