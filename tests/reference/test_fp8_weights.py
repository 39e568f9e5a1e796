"""A grouped linear layer with a weight that is stored in FP8, against plain PyTorch."""

import copy
import io

import pytest
import torch
from rounding import error_of_sums, relative_error
from torch import nn

import fusedmoe as fm
from fusedmoe.fusion.language.rule import FusionRule, Step
from fusedmoe.numerics.formats import E5M2, Quantizer, fp8_block, mxfp8
from fusedmoe.numerics.recipes import Custom, FP8Block
from fusedmoe.ops import GroupedLinear
from fusedmoe.ops.glue import StoredWeight

E = 3
SPLITS = [70, 0, 45]
ROWS = 120  # 5 of them belong to no expert
FP32_SCALES = fp8_block(across=128, power_of_two=False)


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


def in_blocks(t, power_of_two=False):
    """Rows after quantization to E4M3 with one scale for 128 features, in fp64."""
    parts = []
    for part in t.detach().float().split(128, -1):
        amax = part.abs().amax(-1, keepdim=True)
        encode = torch.where(amax > 0, 448 / amax, 1.0)
        if power_of_two:
            encode = torch.exp2(encode.log2().floor())
        parts.append((part * encode).to(torch.float8_e4m3fn).double() / encode.double())
    return torch.cat(parts, -1)


class Product(torch.autograd.Function):
    """``y[r] = q(x[r]) @ w[expert of r].T`` and ``dx[r] = q(dy[r]) @ w[expert of r]`` in fp64."""

    @staticmethod
    def forward(ctx, x, w, q, q_grad):
        ctx.save_for_backward(w)
        ctx.q_grad, ctx.dtype = q_grad, x.dtype
        return Product.times(q(x), w.mT).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        (w,) = ctx.saved_tensors
        return Product.times(ctx.q_grad(dy), w).to(ctx.dtype), None, None, None

    @staticmethod
    def times(rows, w):
        y = torch.zeros(len(rows), w.shape[-1], dtype=torch.float64)
        for part, into, of_expert in zip(rows.split([*SPLITS, 5]), y.split([*SPLITS, 5]), w, strict=False):
            into.copy_(part @ of_expert)
        return y


def product(x, layer, q=in_blocks, q_grad=in_blocks):
    return Product.apply(x, values(layer), q, q_grad)


def rows(k, dtype=torch.float32, seed=1):
    x = torch.randn(ROWS, k, generator=torch.Generator().manual_seed(seed))
    return (x * torch.logspace(-2, 2, ROWS)[:, None]).to(dtype).requires_grad_()


def called(module, x, **named):
    x = x.detach().requires_grad_()
    y = module(x, splits=torch.tensor(SPLITS), **named)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    y.backward(dy)
    return y.detach(), x.grad


def expected(x, layer, **how):
    x = x.detach().requires_grad_()
    y = product(x, layer, **how)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype))
    return y.detach(), x.grad


def assert_close(got, want, tolerance):
    for g, w in zip(got, want, strict=True):
        assert w.norm() > 0
        assert (g.double() - w.double()).norm() < tolerance * w.double().norm()
        assert not g[sum(SPLITS) :].any()


TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


@pytest.mark.parametrize(("n", "k"), [(256, 128), (128, 384), (192, 80), (48, 200)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_output_and_input_gradient_are_those_of_the_formula(dtype, n, k):
    layer, x = stored(n, k), rows(k, dtype)
    assert_close(called(layer, x), expected(x, layer), TOLERANCE[dtype])


def test_a_bias_is_added_and_trained():
    bias = torch.randn(E, 64)
    layer, x = stored(64, 128, bias=bias), rows(128)
    y, dx = called(layer, x)
    without = expected(x, layer)
    of_row = bias.repeat_interleave(torch.tensor(SPLITS), 0)
    assert_close((y[: len(of_row)] - of_row, dx), (without[0][: len(of_row)], without[1]), 2e-6)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    want = torch.stack([part.double().sum(0) for part in dy.split([*SPLITS, 5])[:E]])
    assert relative_error(layer.bias.grad, want) < error_of_sums(70)
    assert layer.weight.grad is None


@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_same_bits_as_a_weight_that_the_recipe_quantizes(power_of_two):
    plain = GroupedLinear(E, 256, 384)
    format = fp8_block(across=128, power_of_two=power_of_two)
    q = fm.quantize(plain.weight.detach(), format)
    layer = GroupedLinear.from_quantized(q.data, q.scale, weight_format=format)
    x = rows(256)
    with fm.recipe(FP8Block(power_of_two=power_of_two)):
        want = called(plain.requires_grad_(False), x)
    got = called(layer, x)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert all(w.any() for w in want)


def test_a_chain_of_experts_is_that_of_the_formula():
    x = rows(128)
    chain = fm.Sequential(stored(2 * 192, 128), fm.SwiGLU(), stored(128, 192, seed=5))
    got = called(chain, x)
    own = x.detach().requires_grad_()
    gate, up = product(own, chain[0]).chunk(2, -1)
    y = product(nn.functional.silu(gate) * up, chain[2])
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
    assert_close(got, (y.detach(), own.grad), 1e-4)  # a rounding step of FP8 may differ


# ---- recipes ------------------------------------------------------------------------------------------------------


def unquantized(t):
    return t.detach().double()


def test_the_recipe_of_the_layer_and_of_the_call_quantize_rows_and_gradients_alone():
    layer, x = stored(256, 128), rows(128)
    of_powers = expected(x, layer, q=lambda t: in_blocks(t, True), q_grad=lambda t: in_blocks(t, True))
    with fm.recipe("fp8_block"):
        assert_close(called(layer, x), of_powers, 2e-6)
    only_rows = Custom("rows", input=Quantizer(fp8_block(power_of_two=False)))
    with fm.recipe(only_rows):
        assert_close(called(layer, x), expected(x, layer, q_grad=unquantized), 2e-6)
    default = expected(x, layer)
    with fm.recipe("bf16"):
        assert_close(called(layer, x), default, 2e-6)
    layer.recipe = "bf16"
    exact = expected(x, layer, q=unquantized, q_grad=unquantized)
    with fm.recipe("fp8_block"):
        assert_close(called(layer, x), exact, 2e-6)
    for other in (of_powers, exact):
        assert (other[0] - default[0]).norm() > 1e-3 * default[0].norm()


def test_quantize_ops_of_the_chain_are_kept():
    format = fp8_block(power_of_two=True)
    chain = fm.Sequential(fm.Quantize(format), stored(256, 128), fm.Quantize(backward=format))
    x = rows(128)
    want = expected(x, chain[1], q=lambda t: in_blocks(t, True), q_grad=lambda t: in_blocks(t, True))
    assert_close(called(chain, x), want, 2e-6)


# ---- LoRA ---------------------------------------------------------------------------------------------------------


def lora(layer, **options):
    adapted = fm.GroupedLoRA(layer, rank=8, alpha=16, **options)
    nn.init.normal_(adapted.lora_B.weight, std=0.1, generator=torch.Generator().manual_seed(3))
    return adapted


def test_lora_has_the_gradients_of_the_formula():
    adapted, x = lora(stored(256, 128)), rows(128)
    assert adapted.lora_A.weight.dtype is torch.float32
    y, dx = called(adapted, x)
    own = x.detach().double().requires_grad_()
    a, b = (p.detach().double().requires_grad_() for p in (adapted.lora_A.weight, adapted.lora_B.weight))
    h = torch.cat([part @ w.T for part, w in zip(own.split([*SPLITS, 5]), a, strict=False)])
    update = torch.cat([part @ w.T for part, w in zip(h.split(SPLITS), b, strict=True)])
    want = product(own, adapted.base_layer)[: len(update)] + 2 * update
    want.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).double()[: len(update)])
    assert_close((y, dx), (torch.cat([want.detach(), torch.zeros(5, 256)]), own.grad), error_of_sums(256, 256))
    a_grad, b_grad = adapted.lora_A.weight.grad, adapted.lora_B.weight.grad
    for expert in (0, 2):
        assert relative_error(a_grad[expert], a.grad[expert]) < error_of_sums(256, 70)  # dy @ B, then over the rows
        assert relative_error(b_grad[expert], b.grad[expert]) < error_of_sums(128, 70)  # x @ A.T, then over the rows
    assert not a_grad[1].any()
    assert not b_grad[1].any()


def test_lora_trains_and_leaves_the_codes():
    torch.manual_seed(0)
    chain = fm.Sequential(
        fm.GroupedLoRA(stored(2 * 128, 64), rank=8), fm.SwiGLU(), fm.GroupedLoRA(stored(64, 128, seed=5), rank=8)
    )
    before = copy.deepcopy(chain.state_dict())
    x, target = torch.randn(ROWS, 64, dtype=torch.bfloat16), torch.randn(ROWS, 64)
    trained = [p for p in chain.parameters() if p.requires_grad]
    assert len(trained) == 4
    optimizer = torch.optim.AdamW(trained, lr=3e-2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        y = chain(x, splits=torch.tensor(SPLITS))
        loss = (y.float() - target)[: sum(SPLITS)].square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    for name, t in chain.state_dict().items():
        assert ("base_layer" in name) is bool(torch.equal(t.float(), before[name].float())), name


def test_merged_lora_has_the_dequantized_weight():
    adapted = lora(stored(192, 80), dtype=torch.float64)
    merged = adapted.merged()
    update = 2 * adapted.lora_B.weight @ adapted.lora_A.weight
    torch.testing.assert_close(merged.weight, values(adapted.base_layer) + update, rtol=1e-6, atol=1e-8)
    assert merged.weight_format is None
    assert merged.weight.requires_grad


def test_dequantized_is_the_weight():
    layer = stored(192, 80)
    torch.testing.assert_close(layer.dequantized(torch.float64), values(layer), rtol=1e-6, atol=0)
    assert layer.dequantized(torch.bfloat16).dtype is torch.bfloat16
    plain = GroupedLinear(E, 64, 64)
    assert torch.equal(plain.dequantized(), plain.weight)
    assert plain.dequantized().data_ptr() != plain.weight.data_ptr()


# ---- parameters ---------------------------------------------------------------------------------------------------


def test_the_state_dict_has_the_names_of_a_checkpoint_and_loads():
    one, other = stored(192, 80), GroupedLinear(E, 80, 192, weight_format=FP32_SCALES)
    state = one.state_dict()
    assert {name: t.dtype for name, t in state.items()} == {
        "weight": torch.float8_e4m3fn,
        "weight_scale_inv": torch.float32,
    }
    other.load_state_dict(state)
    x = rows(80)
    assert all(torch.equal(g, w) for g, w in zip(called(other, x), called(one, x), strict=True))
    on_meta = GroupedLinear(E, 80, 192, device="meta", weight_format=FP32_SCALES)
    on_meta.load_state_dict(state, assign=True)
    assert torch.equal(called(on_meta, x)[0], called(one, x)[0])
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    for again in (copy.deepcopy(one), torch.load(file, weights_only=False)):
        assert torch.equal(called(again, x)[0], called(one, x)[0])


def test_a_new_layer_is_drawn_as_one_in_high_precision():
    torch.manual_seed(0)
    layer = GroupedLinear(E, 200, 300, bias=True, weight_format=FP32_SCALES, dtype=torch.bfloat16)
    assert layer.bias.dtype is torch.bfloat16
    drawn = values(layer) * 200**0.5
    assert drawn.abs().max() == pytest.approx(1, abs=0.05)
    assert drawn.std() == pytest.approx(3**-0.5, rel=0.02)
    assert not layer.weight.requires_grad
    assert "weight_format='fp8 e4m3 128x128'" in repr(layer)


def test_a_cast_of_the_module_casts_the_bias_alone():
    layer = stored(192, 80, bias=torch.randn(E, 192))
    codes, scale = layer.weight.clone(), layer.weight_scale_inv.clone()
    module = nn.Sequential(layer).bfloat16()
    assert module[0].bias.dtype is torch.bfloat16
    assert torch.equal(layer.weight.float(), codes.float())
    assert layer.weight.dtype is torch.float8_e4m3fn
    assert torch.equal(layer.weight_scale_inv, scale)
    assert layer.to("meta", torch.float16).weight.dtype is torch.float8_e4m3fn
    assert layer.weight.is_meta


def test_autocast_leaves_codes_and_scales():
    layer, x = stored(256, 128), rows(128)
    with torch.autocast("cpu", torch.bfloat16):
        y, dx = called(layer, x)
    assert y.dtype is torch.bfloat16
    assert dx.dtype is torch.float32
    want = called(layer, x.detach().bfloat16())
    assert torch.equal(y, want[0])
    assert want[0].any()


def test_parameters_of_another_module():
    layer, x = stored(256, 128), rows(128)
    chain = fm.Sequential(GroupedLinear(E, 128, 256, device="meta", weight_format=FP32_SCALES)).without_parameters()
    given = {"0.weight": layer.weight, "0.weight_scale_inv": layer.weight_scale_inv, "0.bias": None}
    y = chain.forward_with(given, x, splits=torch.tensor(SPLITS))
    assert torch.equal(y, called(layer, x)[0])
    message = r"0.GroupedLinear.*weight_scale_inv: expected shape \(3, 2, 1\) in torch.float32, got None"
    with pytest.raises(fm.InputError, match=message):
        chain.forward_with({"0.weight": layer.weight}, x, splits=torch.tensor(SPLITS))
    with pytest.raises(fm.InputError, match=r"weight: expected shape .* in torch.float8_e4m3fn, got .* torch.bfloat16"):
        chain.forward_with(given | {"0.weight": layer.weight.bfloat16()}, x, splits=torch.tensor(SPLITS))


# ---- the plan -----------------------------------------------------------------------------------------------------


def test_the_backward_pass_transposes_the_codes_and_keeps_no_copy():
    chain = fm.Sequential(stored(2 * 128, 64), fm.SwiGLU(), stored(64, 128, seed=5))
    x = rows(64)
    (plan,) = chain.explain(x, splits=torch.tensor(SPLITS)).plans
    assert "columns" not in plan.forward_source
    assert not any("weight" in value for value in plan.kept)
    assert plan.weight_bytes == 0
    lines = plan.backward_source.splitlines()
    made = [i for i, line in enumerate(lines) if "_weight_quantized_columns_codes, " in line.partition(" = run")[0]]
    made = [i for i in made if " = run" in lines[i]]
    freed = [i for i, line in enumerate(lines) if "del" in line and "_weight_quantized_columns_codes" in line]
    assert len(made) == len(freed) == 2
    assert made[0] < freed[0] < made[1] < freed[1]  # never both at once
    called(chain, x)
    assert fm.weight_cache_bytes(chain) == 0


def test_the_plan_of_a_model_is_for_rows_in_bf16():
    chain = fm.Sequential(stored(2 * 128, 64), fm.SwiGLU(), stored(64, 128, seed=5))
    for model in (nn.Sequential(chain), nn.Sequential(chain).to("meta")):
        (plan,) = fm.explain(model, tokens=64, arch=90).plans
        assert plan.dtype == "bfloat16"
        assert [step.rule for step in plan.steps if "Linear" in str(step.ops)]
        assert not plan.missed
    with torch.device("meta"):
        moe = fm.MoE(64, 128, num_experts=E, top_k=2)
        moe.experts.gate_up = GroupedLinear(E, 64, 256, weight_format=FP32_SCALES)
        moe.experts.down = GroupedLinear(E, 128, 64, weight_format=FP32_SCALES)
    (plan,) = fm.explain(moe, tokens=64, arch=90).plans
    assert ("experts.gate_up:input", "fp8 e4m3 1x128") in {q for step in plan.steps for q in step.quantizes}


def test_a_rule_gets_the_parameters_themselves():
    seen = {}

    class Gemm(FusionRule, name="toy.gemm", direction="forward"):
        fc: GroupedLinear
        takes_quantized = True

        def offer(self, ctx):
            seen["format"] = ctx.spec("fc.weight").format
            return Step(needs=("input", "fc.weight", "offsets"), gives=("output",), zeroes_tail=True)

        def build(self, ctx, keep):
            def run(x, x_scale, codes, scale, offsets):
                return [x_scale.new_full((len(x), codes.shape[1]), 7.0)]

            def bind(x, x_scale, codes, scale, offsets):
                seen.update(codes=codes, scale=scale)
                return run

            return bind

    layer, x = stored(256, 128), rows(128)
    with fm.register(Gemm):
        y = layer(x.detach(), splits=torch.tensor(SPLITS))
    assert (y == 7).all()
    assert seen["format"] == FP32_SCALES
    assert seen["codes"].data_ptr() == layer.weight.data_ptr()
    assert seen["scale"].data_ptr() == layer.weight_scale_inv.data_ptr()


def test_a_rule_transposes_the_codes():
    calls = []

    class Transpose(FusionRule, name="toy.transpose", direction="backward"):
        glue: StoredWeight

        def offer(self, ctx):
            return Step(needs=("glue.weight", "glue.scale"), gives=(), keeps=("glue.output:columns",))

        def build(self, ctx, keep):
            def run(weight, scale):
                calls.append(tuple(weight.shape))
                return weight.mT.contiguous(), scale.mT

            return lambda weight, scale: run

    chain = fm.Sequential(stored(2 * 128, 64), fm.SwiGLU(), stored(64, 128, seed=5))
    x = rows(64)
    want = called(chain, x)
    with fm.register(Transpose):
        got = called(chain, x)
    assert calls == [(E, 64, 128), (E, 256, 64)]  # each right before its product
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_a_compiled_module_computes_the_same():
    chain = fm.Sequential(lora(stored(2 * 128, 64)), fm.SwiGLU(), stored(64, 128, seed=5))
    x = rows(64)
    want = called(chain, x)
    got = called(torch.compile(chain, fullgraph=True, backend="aot_eager"), x)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert all(w.any() for w in want)


def test_activation_checkpointing_computes_the_same():
    chain, x = fm.Sequential(stored(2 * 128, 64), fm.SwiGLU(), stored(64, 128, seed=5)), rows(64)
    want = called(chain, x)

    def again(x, splits):
        return torch.utils.checkpoint.checkpoint(lambda x: chain(x, splits=splits), x, use_reentrant=False)

    assert all(torch.equal(g, w) for g, w in zip(called(again, x), want, strict=True))


# ---- errors -------------------------------------------------------------------------------------------------------


def test_a_weight_that_requires_a_gradient_is_refused_in_training_alone():
    layer, x = stored(256, 128), rows(128)
    want, _ = called(layer, x)
    layer.requires_grad_()
    with pytest.raises(
        fm.InputError, match=r"weight: expected requires_grad=False, since .* has no gradient, got True"
    ):
        layer(x, splits=torch.tensor(SPLITS))
    with torch.no_grad():
        assert torch.equal(layer(x, splits=torch.tensor(SPLITS)), want)


@pytest.mark.parametrize("format", ["fp8_block", fp8_block(), mxfp8(across=32), fp8_block(E5M2, across=128)])
def test_other_formats_are_refused(format):
    with pytest.raises(
        fm.InputError, match=r"weight_format: expected fusedmoe.numerics.formats.fp8_block\(across=128\) or None"
    ):
        GroupedLinear(E, 128, 128, weight_format=format)


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(fm.InputError, match="accumulate_into_main_grad: expected False"):
        GroupedLinear(E, 128, 128, weight_format=FP32_SCALES, accumulate_into_main_grad=True)
    layer = stored(128, 128)
    with pytest.raises(fm.InputError, match=r"weight_format: expected .*, which cannot be changed"):
        layer.weight_format = fp8_block(across=128)
    with pytest.raises(fm.InputError, match="expected a layer with an unquantized weight"):
        fm.Sequential(fm.Quantize(weight="fp8_block"), layer)(rows(128), splits=torch.tensor(SPLITS))
    with pytest.raises(fm.InputError, match=r"layer: expected layers with unquantized weights"):
        fm.load_experts(
            fm.Sequential(layer, fm.SquaredReLU(), stored(128, 128)),
            up=torch.zeros(E, 128, 128),
            down=torch.zeros(E, 128, 128),
        )


def test_rows_in_fp64_are_refused():
    layer = stored(128, 128, recipe="bf16")
    with pytest.raises(fm.InputError, match=r"x: expected float32, bfloat16 or float16, .* got torch.float64"):
        layer(rows(128, torch.float64), splits=torch.tensor(SPLITS))


CODES, SCALE = torch.zeros(E, 256, 128, dtype=torch.float8_e4m3fn), torch.ones(E, 2, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((CODES.float(), SCALE), r"weight: expected shape .* in torch.float8_e4m3fn, got .* in torch.float32"),
        ((CODES[0], SCALE), r"weight: expected codes \(E, N, K\), got shape \(256, 128\)"),
        ((CODES, SCALE.mT), r"weight_scale_inv: expected shape \(3, 2, 1\) in torch.float32, got shape \(3, 1, 2\)"),
        ((CODES, SCALE.bfloat16()), r"weight_scale_inv: expected shape .* in torch.float32, got .* in torch.bfloat16"),
        ((CODES, None), "weight_scale_inv: expected a tensor, got NoneType"),
        ((CODES, SCALE, torch.zeros(E, 128)), r"bias: expected shape \(3, 256\), got \(3, 128\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(given, message):
    with pytest.raises(fm.InputError, match=message):
        GroupedLinear.from_quantized(*given)


def test_values_are_not_loaded_as_codes_nor_codes_as_values():
    plain, layer = GroupedLinear(E, 128, 256), stored(256, 128)
    before = layer.weight.clone()
    with pytest.raises(RuntimeError, match=r"weight: expected codes in float8_e4m3fn, got torch.float32"):
        layer.load_state_dict(plain.state_dict(), strict=False)
    assert torch.equal(layer.weight.float(), before.float())
    with pytest.raises(RuntimeError, match="weight: expected values, not codes"):
        plain.load_state_dict(layer.state_dict(), strict=False)


def test_second_derivatives_are_refused():
    layer, x = stored(256, 128), rows(128)
    y = layer(x, splits=torch.tensor(SPLITS))
    with pytest.raises(RuntimeError, match="quantized values, whose rounding has no derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
