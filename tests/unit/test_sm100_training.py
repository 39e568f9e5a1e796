"""Several calls of chains on the rules for Blackwell: micro-batches, main_grad, and layers that share kernels."""

import shutil

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")
pytest.importorskip("cudnn.gemm.cutedsl.grouped", exc_type=ImportError)
if shutil.which("gcc") is None:
    pytest.skip("needs gcc, which links the kernels' host code", allow_module_level=True)

from kit.sm100_chains import (
    EMULATION,
    SAME,
    assert_near,
    check,
    device_in_pytorch,  # noqa: F401  (a fixture)
    launched,
    launches_of_test,  # noqa: F401  (a fixture)
    rules,
    run,
    swiglu,
)
from kit.sm100_machine import (
    BF16,
    DGRAD,
    DGRAD_ACTIVATION,
    GEMM,
    GEMM_ACTIVATION,
    QUANTIZE,
    QUANTIZE_GRAD,
    QUANTIZE_WEIGHT,
    ROWS,
    SPLITS,
    WGRAD,
    H,
    blackwell_machine,  # noqa: F401  (a fixture)
    experts,
    inputs,
    tokens,
)
from kit.toy import only_plan

import fusedmoe as fm
from fusedmoe import FusionError
from fusedmoe.kernels.sm100 import calls
from fusedmoe.numerics.formats.packed import quantize_packed

pytestmark = pytest.mark.usefixtures("builtin_rules", "blackwell_machine")


@pytest.fixture
def packed_weights(monkeypatch):
    """The packed forms of weights that were made, by their axes."""
    made = []

    def counting(x, quantizer, form, offsets=None):
        if x.dim() == 3:
            made.append(form.axis)
        return quantize_packed(x, quantizer, form, offsets)

    for module in ("fusedmoe.ops.quantize", "sm100_machine"):  # in plain PyTorch, and in place of the kernel
        monkeypatch.setattr(f"{module}.quantize_packed", counting)
    return made


def batch(count=ROWS, splits=SPLITS):
    """Rows, the gradient of the output, and runtime inputs."""
    return tokens(count, splits), torch.randn(count, H).to(BF16), inputs(count, splits, scale=True)


def into_main_grad(chain):
    """Return the weights by name, each with a main_grad that is not zero."""
    weights = {}
    for name, layer in chain.named_children():
        if isinstance(layer, fm.GroupedLinear):
            layer.accumulate_into_main_grad = True
            layer.weight.main_grad = torch.randn(layer.weight.shape)
            weights[f"{name}.weight"] = layer.weight
    return weights


@pytest.mark.parametrize("act", [swiglu, pytest.param(fm.SquaredReLU, marks=pytest.mark.slow)], ids=["gated", ""])
def test_micro_batches_add_to_main_grad(act, packed_weights, launches):
    """What is there stays, and each batch adds its gradient. The weights are quantized once per optimizer step."""
    chain, batches = experts(act(), scale=True), [batch(), batch(300, (0, 40, 130, 100))]
    with fm.recipe("mxfp8"):
        alone = [run(chain, x, dy, **named) for x, dy, named in batches]
        weights = into_main_grad(chain)
        before = {name: weight.main_grad.clone() for name, weight in weights.items()}
        fm.clear_weight_cache(chain)
        packed_weights.clear()
        launches.clear()
        for (x, dy, named), want in zip(batches, alone, strict=True):
            got = run(chain, x, dy, **named)
            assert {*want} - {*got} <= {*weights}
            assert all(torch.equal(got[name], want[name]) for name in ("y", "x", "probs"))
        assert rules(only_plan(chain, x, **named)) == [
            QUANTIZE_WEIGHT, QUANTIZE_WEIGHT, QUANTIZE, GEMM_ACTIVATION, GEMM,
            QUANTIZE_GRAD, WGRAD, DGRAD_ACTIVATION, WGRAD, DGRAD,
        ]  # fmt: skip
        assert packed_weights == [-1, -2] * 2, "of two layers, in the first call"
        assert launched(launches)["wgrad"] == 4
        added = {name: weight.main_grad - before[name] for name, weight in weights.items()}
        assert_near(added, {name: sum(got[name].float() for got in alone) for name in weights}, SAME)
        assert all(not (weight.grad is not None and weight.grad.any()) for weight in weights.values())

        with torch.no_grad():
            for weight in weights.values():
                weight.sub_(0.1 * weight.main_grad)
        stepped = run(chain, *batches[0][:2], **batches[0][2])
        assert packed_weights == [-1, -2] * 4
        assert not torch.equal(stepped["y"], alone[0]["y"])


def test_the_kernel_adds_to_main_grad_where_rows_of_the_weight_are_in_order(launches):
    """In fp32, without rounding the gradient before. Gate and up are added by another launch."""
    chain, (x, dy, named) = experts(scale=True), batch()
    weights = into_main_grad(chain)
    with fm.recipe("mxfp8"):
        run(chain, x, dy, **named)
    adds = [launch.kernel.accumulate_on_output for launch in launches if "wgrad" in type(launch.kernel).__module__
            and launch.name == "kernel"]  # fmt: skip
    assert adds == [True, False]
    assert all(weight.main_grad.any() for weight in weights.values())


def odd(main_grad, which):
    """The same values, transposed in memory or from an address that is not a multiple of 16 bytes."""
    if which == "transposed":
        return main_grad.mT.contiguous().mT
    memory = torch.empty(main_grad.numel() + 4)
    skipped = (-memory.data_ptr() % 16) // 4 + 1
    return memory[skipped : skipped + main_grad.numel()].view(main_grad.shape).copy_(main_grad)


@pytest.mark.parametrize(
    ("which", "reason"),
    [("transposed", "main_grad is not contiguous"), ("shifted", "main_grad does not begin at a multiple of 16 bytes")],
)
def test_a_main_grad_that_the_kernel_cannot_write(which, reason, launches):
    """Each call decides: main_grad may be another tensor in the next."""
    chain, (x, dy, named) = experts(scale=True), batch()
    with fm.recipe("mxfp8"):
        alone = run(chain, x, dy, **named)
        weights = into_main_grad(chain)
        before = {name: weight.main_grad.clone() for name, weight in weights.items()}
        for weight in weights.values():
            weight.main_grad = odd(weight.main_grad, which)
        launches.clear()
        run(chain, x, dy, **named)
        assert launched(launches)["wgrad"] == 0
        added = {name: weight.main_grad - before[name] for name, weight in weights.items()}
        assert_near(added, {name: alone[name] for name in weights}, EMULATION)
        with fm.strict(), pytest.raises(FusionError, match=f"{WGRAD} declined this call: {reason}"):
            run(chain, x, dy, **named)
        for weight in weights.values():
            weight.main_grad = weight.main_grad.contiguous().clone()
        launches.clear()
        run(chain, x, dy, **named)
        assert launched(launches)["wgrad"] == 2


def test_gradients_of_micro_batches_add_up(packed_weights):
    chain, batches = experts(), [batch(), batch(300, (0, 40, 130, 100))]
    with fm.recipe("mxfp8"):
        alone = [run(chain, x, dy, splits=named["splits"]) for x, dy, named in batches]
        chain.zero_grad()
        packed_weights.clear()
        for x, dy, named in batches:
            chain(x, splits=named["splits"]).backward(dy)
    assert packed_weights == [-1, -2] * 2
    sums = {name: sum(got[name].float() for got in alone) for name, _ in chain.named_parameters()}
    assert_near({name: p.grad for name, p in chain.named_parameters()}, sums, SAME)


def test_two_chains_take_turns(launches):
    """Layers of one shape share kernels, and nothing else."""
    one, other = experts(scale=True), experts(scale=True)
    x, dy, named = batch()
    with fm.recipe("mxfp8"):
        alone = [run(chain, x, dy, **named) for chain in (one, other)]
        kernels = calls.kernel.cache_info().currsize
        outputs = []
        for chain in (one, other):
            chain.zero_grad()
            outputs.append(chain(x, **named))
        for y in outputs[::-1]:
            y.backward(dy)
    assert calls.kernel.cache_info().currsize == kernels
    assert not torch.equal(outputs[0], outputs[1])
    for chain, y, want in zip((one, other), outputs, alone, strict=True):
        assert torch.equal(y, want["y"])
        assert all(torch.equal(p.grad, want[name]) for name, p in chain.named_parameters())


def test_two_chains_with_other_constants_take_turns(launches):
    """They are parameters of one kernel, and constants of two others."""
    one, other = (experts(fm.SwiGLU(limit=4.0, alpha=1.702, offset=1.0), scale=True),
                  experts(fm.SwiGLU(limit=2.0, alpha=1.5, offset=0.5), scale=True))  # fmt: skip
    other.load_state_dict(one.state_dict())
    check(one, tokens(), **inputs(scale=True))
    check(other, tokens(), **inputs(scale=True))
    check(one, tokens(), **inputs(scale=True))
    assert launched(launches)["dglu"] == 3
    assert len({id(launch.kernel) for launch in launches if "dglu" in type(launch.kernel).__module__}) == 2
