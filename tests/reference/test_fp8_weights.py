"""A grouped linear layer with a weight that is stored in FP8, against plain PyTorch."""

import copy

import pytest
import torch
from kit.compare import assert_accurate, assert_bitwise, pairwise
from kit.layers import outcome
from kit.oracles import exact_outcome, quantized
from kit.rounding import error_bound
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm
from fusedmoe.numerics.formats import E5M2, Quantizer, fp8_block, mxfp8
from fusedmoe.numerics.formats.roles import Roles
from fusedmoe.numerics.recipes import Custom, FP8Block
from fusedmoe.ops import GroupedLinear

E = 3
SPLITS, ROWS, TOTAL = torch.tensor([70, 0, 45]), 120, 115  # 5 rows belong to no expert
FP32_SCALES = fp8_block(across=128, power_of_two=False)
IN_BLOCKS, POWERS = Quantizer(fp8_block(power_of_two=False)), Quantizer(fp8_block())


def stored(n, k, *, seed=0, **options):
    """A layer with codes and scales as a checkpoint has them: the scales are no powers of two."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(E, n, k, generator=generator).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(E, -(-n // 128), -(-k // 128), generator=generator).add_(0.3).mul_(0.01 / k**0.5)
    return GroupedLinear.from_quantized(codes, scale, **options)


def values(layer):
    """The weight in fp64."""
    scale = layer.weight_scale_inv.double().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return layer.weight.double() * scale[:, : layer.out_features, : layer.in_features]


def plain(layer):
    """The same layer with its weight in fp64."""
    bias = layer.bias is not None
    same = GroupedLinear(E, layer.in_features, layer.out_features, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        same.weight.requires_grad_(False).copy_(values(layer))
        if bias:
            same.bias.copy_(layer.bias)
    return same


def rows(k, dtype=torch.float32):
    x = torch.randn(ROWS, k, generator=torch.Generator().manual_seed(1))
    return (x * torch.logspace(-2, 2, ROWS)[:, None]).to(dtype).requires_grad_()


def dy_of(module, x):
    width = [m.out_features for m in module.modules() if isinstance(m, GroupedLinear)][-1]
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(2)).to(x.dtype)


def called(module, x, recipe=None, call=None):
    """The output, and the gradients of the rows and of what is trained."""
    return outcome(module, x, dy_of(module, x), recipe, call, splits=SPLITS)


def expected(module, x, input=IN_BLOCKS, grad=IN_BLOCKS):
    ops = module if isinstance(module, fm.Sequential) else [module]
    exact = fm.Sequential(*[plain(op) if isinstance(op, GroupedLinear) else op for op in ops])
    return exact_outcome(exact, x, dy_of(module, x), linear=quantized(Roles(input, None, grad)), splits=SPLITS)


def assert_formula(got, want, bound=2e-6):
    assert_accurate([*got.values()], [*want.values()], bound)
    assert not any(got[name][TOTAL:].any() for name in ("y", "x"))


@pytest.mark.parametrize(
    ("size", "dtype"),
    pairwise([(256, 128), (128, 384), (192, 80), (48, 200)], [torch.float32, torch.bfloat16, torch.float16]),
    ids=str,
)
def test_output_and_input_gradient_are_those_of_the_formula(size, dtype):
    layer, x = stored(*size), rows(size[1], dtype)
    # both are rounded to the dtype; between sums in fp32 and fp64 one rounding step of FP8 may differ
    assert_formula(called(layer, x), expected(layer, x), error_bound(dtype, 256, roundings=1))


def test_a_bias_is_added_and_trained_and_a_chain_is_that_of_the_formula():
    layer, x = stored(64, 128, bias=torch.randn(E, 64)), rows(128)
    assert_formula(called(layer, x), expected(layer, x), error_bound(torch.float32, 256))
    chain = fm.Sequential(stored(2 * 192, 128), fm.SwiGLU(), stored(128, 192, seed=5))
    assert_formula(called(chain, x), expected(chain, x), 1e-4)  # a rounding step of FP8 may differ


@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_same_bits_as_a_weight_that_the_recipe_quantizes(power_of_two):
    layer, x = GroupedLinear(E, 256, 384).requires_grad_(False), rows(256)
    format = fp8_block(across=128, power_of_two=power_of_two)
    q = fm.quantize(layer.weight.detach(), format)
    want = called(layer, x, FP8Block(power_of_two=power_of_two))
    assert_bitwise(called(GroupedLinear.from_quantized(q.data, q.scale, weight_format=format), x), want)


def test_the_recipes_and_the_quantize_ops_quantize_rows_and_gradients_alone():
    layer, x = stored(256, 128), rows(128)
    default, of_powers, exact = expected(layer, x), expected(layer, x, POWERS, POWERS), expected(layer, x, None, None)
    for other in (of_powers, exact):
        assert (other["y"] - default["y"]).norm() > 1e-3 * default["y"].norm()
    assert_formula(called(layer, x, "fp8_block"), of_powers)
    assert_formula(called(layer, x, Custom("rows", input=IN_BLOCKS)), expected(layer, x, grad=None))
    assert_formula(called(layer, x, "bf16"), default)
    format = fp8_block(power_of_two=True)
    assert_formula(called(fm.Sequential(fm.Quantize(format), layer, fm.Quantize(backward=format)), x), of_powers)
    layer.recipe = "bf16"
    assert_formula(called(layer, x, "fp8_block"), exact)


def lora(layer, **options):
    adapted = fm.GroupedLoRA(layer, rank=8, alpha=16, **options)
    nn.init.normal_(adapted.lora_B.weight, std=0.1, generator=torch.Generator().manual_seed(3))
    return adapted


def test_merged_and_dequantized():
    adapted = lora(stored(192, 80), dtype=torch.float64)
    merged, layer = adapted.merged(), adapted.base_layer
    update = 2 * adapted.lora_B.weight @ adapted.lora_A.weight
    torch.testing.assert_close(merged.weight, values(layer) + update, rtol=1e-6, atol=1e-8)
    assert merged.weight_format is None
    assert merged.weight.requires_grad
    torch.testing.assert_close(layer.dequantized(torch.float64), values(layer), rtol=1e-6, atol=0)
    unquantized = GroupedLinear(E, 64, 64)
    assert torch.equal(unquantized.dequantized(), unquantized.weight)
    assert unquantized.dequantized().data_ptr() != unquantized.weight.data_ptr()


# --- parameters ----------------------------------------------------------------------------------------------------


def test_the_state_dict_has_the_names_of_a_checkpoint_and_loads():
    one, x = stored(192, 80), rows(80)
    state, want = one.state_dict(), called(one, x)
    dtypes = {"weight": torch.float8_e4m3fn, "weight_scale_inv": torch.float32}
    assert {name: t.dtype for name, t in state.items()} == dtypes
    other = GroupedLinear(E, 80, 192, weight_format=FP32_SCALES)
    other.load_state_dict(state)
    on_meta = GroupedLinear(E, 80, 192, device="meta", weight_format=FP32_SCALES)
    on_meta.load_state_dict(state, assign=True)
    for again in (other, on_meta, copy.deepcopy(one)):
        assert_bitwise(called(again, x), want)


def test_a_new_layer_is_drawn_as_one_in_high_precision():
    layer = GroupedLinear(E, 200, 300, bias=True, weight_format=FP32_SCALES, dtype=torch.bfloat16)
    assert layer.bias.dtype is torch.bfloat16
    drawn = values(layer) * 200**0.5
    assert drawn.abs().max() == pytest.approx(1, abs=0.05)
    assert drawn.std() == pytest.approx(3**-0.5, rel=0.02)
    assert not layer.weight.requires_grad


def test_casts_and_autocast_leave_codes_and_scales():
    layer, x = stored(192, 128, bias=torch.randn(E, 192)), rows(128)
    codes, scale = layer.weight.clone(), layer.weight_scale_inv.clone()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, splits=SPLITS)
    module = nn.Sequential(layer).bfloat16()
    assert_bitwise(y, layer(x.bfloat16(), splits=SPLITS))
    assert module[0].bias.dtype is torch.bfloat16
    assert torch.equal(layer.weight.float(), codes.float())
    assert torch.equal(layer.weight_scale_inv, scale)
    assert layer.to("meta", torch.float16).weight.dtype is torch.float8_e4m3fn
    assert layer.weight.is_meta


def test_compiled_and_checkpointed_calls_compute_the_same():
    chain, x = fm.Sequential(lora(stored(2 * 128, 64)), fm.SwiGLU(), stored(64, 128, seed=5)), rows(64)
    want = called(chain, x)

    def again(x, splits):
        return checkpoint(lambda x: chain(x, splits=splits), x, use_reentrant=False)

    for call in (again, torch.compile(chain, fullgraph=True, backend="aot_eager")):
        assert_bitwise(called(chain, x, call=call), want)


# --- refusals ------------------------------------------------------------------------------------------------------


def test_a_weight_that_requires_a_gradient_is_refused_in_training_alone():
    layer, x = stored(256, 128), rows(128)
    want = layer(x, splits=SPLITS)
    layer.requires_grad_()
    with pytest.raises(fm.InputError, match="weight: expected requires_grad=False"):
        layer(x, splits=SPLITS)
    with torch.no_grad():
        assert torch.equal(layer(x, splits=SPLITS), want)


CODES, SCALE = torch.zeros(E, 256, 128, dtype=torch.float8_e4m3fn), torch.ones(E, 2, 1)


def made(format, **more):
    return lambda: GroupedLinear(E, 128, 128, weight_format=format, **more)


def of(*given):
    return lambda: GroupedLinear.from_quantized(*given)


def call(layer, x=None):
    return lambda: layer(rows(128) if x is None else x, splits=SPLITS)


def loaded():
    chain, zeros = fm.Sequential(stored(128, 128), fm.SquaredReLU(), stored(128, 128)), torch.zeros(E, 128, 128)
    fm.load_experts(chain, up=zeros, down=zeros)


def weights_of_the_call():
    given = {"0.weight": torch.zeros(E, 128, 128), "0.weight_scale_inv": torch.ones(E, 1, 1)}
    fm.Sequential(stored(128, 128)).without_parameters().forward_with(given, rows(128), splits=SPLITS)


REFUSED = {
    "a name": (made("fp8_block"), "weight_format"),
    "blocks of one row": (made(fp8_block()), "weight_format"),
    "MXFP8": (made(mxfp8(across=32)), "weight_format"),
    "E5M2": (made(fp8_block(E5M2, across=128)), "weight_format"),
    "main_grad": (made(FP32_SCALES, accumulate_into_main_grad=True), "accumulate_into_main_grad"),
    "change": (lambda: setattr(stored(128, 128), "weight_format", fp8_block(across=128)), "cannot be changed"),
    "quantized twice": (call(fm.Sequential(fm.Quantize(weight="fp8_block"), stored(128, 128))), "unquantized weight"),
    "loaded": (loaded, "layer: .*unquantized weights"),
    "weights of the call": (weights_of_the_call, "weight: .*float32"),
    "fp64": (call(stored(128, 128, recipe="bf16"), rows(128, torch.float64)), "x: .*float64"),
    "values": (of(CODES.float(), SCALE), "weight: .*float32"),
    "two axes": (of(CODES[0], SCALE), r"weight: .*codes \(E, N, K\)"),
    "scale's shape": (of(CODES, SCALE.mT), "weight_scale_inv: .*shape"),
    "scale's dtype": (of(CODES, SCALE.bfloat16()), "weight_scale_inv: .*bfloat16"),
    "no scale": (of(CODES, None), "weight_scale_inv: .*NoneType"),
    "bias": (of(CODES, SCALE, torch.zeros(E, 128)), "bias"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    refused, word = REFUSED[case]
    with pytest.raises(fm.InputError, match=word):
        refused()


def test_values_are_not_loaded_as_codes_nor_codes_as_values():
    unquantized, layer = GroupedLinear(E, 128, 256), stored(256, 128)
    before = layer.weight.clone()
    with pytest.raises(RuntimeError, match="weight: expected codes"):
        layer.load_state_dict(unquantized.state_dict(), strict=False)
    assert torch.equal(layer.weight.float(), before.float())
    with pytest.raises(RuntimeError, match="weight: expected values"):
        unquantized.load_state_dict(layer.state_dict(), strict=False)
