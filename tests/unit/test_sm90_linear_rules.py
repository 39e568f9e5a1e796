"""The rules for sm_90 of dense layers, on the CPU: stand-ins compute what the kernels do with one group."""

import pytest
import torch
from kit import sm90_stand_ins as stand_ins
from kit.toy import only_plan, outcome, rules_used, status
from test_sm90_rules import BF16, assert_close, called, hopper_machine, strided  # noqa: F401  (a fixture)
from torch import nn

import fusedmoe as fm
from fusedmoe import FusionError, Status
from fusedmoe.kernels.options import KernelOptions
from fusedmoe.kernels.sm90 import one_group

H, I = 32, 16  # noqa: E741  (hidden, intermediate)
pytestmark = pytest.mark.usefixtures("builtin_rules")


def mlp(act=fm.SwiGLU, *, bias=True, dtype=BF16, hidden=H, width=I, options=None, **settings):
    wide = 1 if act is fm.SquaredReLU else 2
    return fm.Sequential(
        fm.Linear(hidden, wide * width, bias=bias, dtype=dtype, **settings),
        act(),
        fm.Linear(width, hidden, bias=bias, dtype=dtype, **settings),
        **(options or {}),
    )


def rows(*shape, requires_grad=True, dtype=BF16):
    return torch.randn(*(shape or (15,)), H, dtype=dtype).requires_grad_(requires_grad)


def both_ways(chain, x, **named):
    """Check a fused call, without a miss, against the unfused one; return its plan."""
    with fm.disabled("*"):
        expected = outcome(chain, x, **named)
    stand_ins.calls.clear()
    with fm.strict():
        got = outcome(chain, x, **named)
    assert_close(got, expected)
    return only_plan(chain, x, **named)


@pytest.mark.parametrize("shape", [(15,), (1,), (3, 5), (2, 1, 4)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("act", [fm.SwiGLU, fm.GeGLU, fm.ReGLU, fm.SquaredReLU])
def test_the_whole_plan_computes_the_same(act, bias, shape):
    plan = both_ways(mlp(act, bias=bias), rows(*shape))
    assert not plan.unfused
    sums = ["sm90.linear_column_sums"] if bias else []
    assert rules_used(plan) == [
        "sm90.linear_activation",
        "sm90.linear",
        *sums,
        "sm90.linear_wgrad",
        "sm90.linear_dgrad_activation",
        *sums,
        "sm90.linear_wgrad",
        "sm90.linear_dgrad",
    ]
    assert set(plan.kept) == {"0.input", "1.input"}


def test_fp16():
    assert not both_ways(mlp(dtype=torch.float16), rows(dtype=torch.float16)).unfused


def test_nothing_is_kept_for_inference():
    chain = mlp()
    with torch.no_grad():
        chain(rows(requires_grad=False))
    assert called("grouped_gemm_activation") == [
        {"options": KernelOptions(), "keep_preactivation": False, "row_scale": False}
    ]


@pytest.mark.parametrize(
    ("frozen", "run"),
    [
        (("x",), ["backward", "wgrad", "wgrad"]),
        (("0.weight",), ["wgrad", "backward", "gemm"]),
        (("2.weight",), ["backward", "wgrad", "gemm"]),
        (("0.weight", "2.weight"), ["backward", "gemm"]),
        (("x", "0.weight"), ["wgrad"]),
    ],
    ids=str,
)
def test_frozen_parts(frozen, run):
    chain, x = mlp(bias=False), rows(requires_grad="x" not in frozen)
    for name, parameter in chain.named_parameters():
        parameter.requires_grad_(name not in frozen)
    both_ways(chain, x)
    ran = [name.removeprefix("grouped_").rpartition("_")[2] for name in called()]
    assert sorted(ran[2:]) == sorted(run)


@pytest.mark.parametrize("shape", [(15,), (3, 5)], ids=str)
def test_main_grad(shape):
    chain, x = mlp(bias=False, accumulate_into_main_grad=True), rows(*shape)
    start = {name: torch.randn(p.shape) for name, p in chain.named_parameters()}

    def main_grads():
        for name, parameter in chain.named_parameters():
            parameter.main_grad = start[name].clone()
            parameter.grad_added_to_main_grad = False
        chain(x).sum().backward()
        assert all(p.grad_added_to_main_grad for p in chain.parameters())
        return {name: p.main_grad - start[name] for name, p in chain.named_parameters()}

    with fm.disabled("*"):
        expected = main_grads()
    with fm.strict():
        assert_close(main_grads(), expected)
    assert [what["accumulate"] for what in called("grouped_wgrad")] == [True, True]
    chain[0].weight.main_grad = torch.zeros(H, 2 * I).T
    with fm.strict(), pytest.raises(FusionError, match="main_grad is not contiguous"):
        chain(x).sum().backward()


SPLITS, ROWS = (5, 0, 7), 15
IN_A_CHAIN = {
    "before the experts": lambda: (fm.Linear(H, H, dtype=BF16), fm.GroupedLinear(3, H, H, dtype=BF16)),
    "after them": lambda: (fm.GroupedLinear(3, H, H, dtype=BF16), fm.Linear(H, H, dtype=BF16)),
    "a whole MLP before them": lambda: (*mlp(), fm.GroupedLinear(3, H, H, dtype=BF16)),
    "a whole MLP after them": lambda: (fm.GroupedLinear(3, H, H, dtype=BF16), *mlp()),
}


@pytest.mark.parametrize("ops", IN_A_CHAIN.values(), ids=IN_A_CHAIN)
def test_rows_of_no_expert_count_in_no_gradient(ops):
    chain, x, upstream = fm.Sequential(*ops()), rows(ROWS).detach(), torch.randn(ROWS, H, dtype=BF16)

    def results(poison):
        leaf, dy = x.clone(), upstream.clone()
        leaf[sum(SPLITS) :] = dy[sum(SPLITS) :] = poison
        leaf.requires_grad_()
        chain.zero_grad()
        y = chain(leaf, splits=torch.tensor(SPLITS))
        y.backward(dy)
        return {"y": y.detach(), "x": leaf.grad, **{name: p.grad for name, p in chain.named_parameters()}}

    with fm.disabled("*"):
        expected = results(torch.nan)
    with fm.strict():
        got = results(torch.nan)
        assert all(torch.equal(got[name], t) for name, t in results(torch.inf).items())
    assert_close(got, expected)


def test_rows_with_more_dimensions_have_no_splits(caplog):
    """``splits`` count the first dimension; the kernels count rows."""
    op, x = fm.Linear(H, H, dtype=BF16), rows(ROWS, 2)
    splits = torch.tensor(SPLITS)
    with fm.strict(), pytest.raises(FusionError, match="the chain has splits, and rows with 3 dimensions, not 2"):
        op(x, splits=splits).sum().backward()
    op.zero_grad()
    op(x, splits=splits).sum().backward()
    got = op.bias.grad.clone()
    op.zero_grad()
    with fm.disabled("*"):
        op(x, splits=splits).sum().backward()
    assert torch.equal(got, op.bias.grad)
    assert got.eq(2 * sum(SPLITS)).all()


STRIDED = {
    "leading dimensions in another order": lambda: torch.randn(3, 5, H, dtype=BF16).transpose(0, 1),
    "a part of the features": lambda: torch.randn(3, 5, H + 8, dtype=BF16)[..., :H],
    "every second row": lambda: torch.randn(3, 10, H, dtype=BF16)[:, ::2],
}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
def test_rows_with_strides(make):
    chain, x = mlp(), make().requires_grad_()
    assert not both_ways(chain, x).unfused
    with fm.strict():
        y = chain(x)
    with fm.disabled("*"):
        expected = chain(x)
    assert_close({"y": y.detach()}, {"y": expected.detach()})


@pytest.mark.parametrize("shape", [(15,), (3, 5)], ids=str)
def test_gradients_with_strides(shape):
    chain, x = mlp(), rows(*shape)
    for make in (lambda y: y.sum(), lambda y: (y.mT * torch.linspace(-1, 1, y.mT.numel()).view_as(y.mT)).sum()):
        found = {}
        for patterns in ((), ("*",)):
            x.grad = None
            chain.zero_grad()
            with fm.disabled(*patterns), fm.strict():
                make(chain(x)).backward()
            found[patterns] = {"x": x.grad, **{name: p.grad for name, p in chain.named_parameters()}}
        assert_close(found[()], found["*",])


def test_a_transposed_weight():
    chain = mlp()
    for i in (0, 2):
        chain[i].weight = nn.Parameter(chain[i].weight.detach().T.contiguous().T)
    assert not both_ways(chain, rows()).unfused


@pytest.mark.parametrize(
    ("how", "reason"),
    [("address", "does not begin at a multiple of 16 bytes"), ("pitch", r"has strides \(1152, 36, 1\)")],
)
def test_a_weight_that_the_kernels_cannot_read(how, reason):
    chain, x = mlp(), rows()
    with fm.disabled("*"):
        expected = outcome(chain, x)
    chain[0].weight = nn.Parameter(strided(chain[0].weight.detach(), how))
    assert_close(outcome(chain, x), expected)
    with fm.strict(), pytest.raises(FusionError, match=f"the weight {reason}"):
        chain(x)


def test_no_rows():
    chain, x = mlp(), rows(2, 0)
    with fm.strict():
        y = chain(x)
        y.sum().backward()
    assert y.shape == (2, 0, H)
    assert called() == []
    assert not any(p.grad.any() for p in chain.parameters())


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"hidden": 36}, "in_features 36 is not a multiple of 8"),
        ({"width": 12}, "half of out_features 12 is not a multiple of 8"),
    ],
)
def test_odd_widths(sizes, reason):
    chain = mlp(**sizes)
    x = torch.randn(9, chain[0].in_features, dtype=BF16)
    assert status(only_plan(chain, x), "sm90.linear_activation", 0) == (Status.CONSTRAINT, reason)
    with fm.strict(), pytest.raises(FusionError, match=reason):
        chain(x)


def test_another_dtype():
    plan = only_plan(mlp(dtype=torch.float32), rows(dtype=torch.float32))
    assert not plan.fused
    assert {a.reason for a in plan.attempts if a.status is Status.CONSTRAINT} == {
        f"{operand} is float32, not bfloat16 or float16: convert the module, or run under torch.autocast"
        for operand in ("input", "grad_output")
    }


def test_a_gate_with_one_feature_is_no_miss(caplog):
    gate, x = fm.Linear(H, 1, bias=False, dtype=BF16), rows()
    with fm.strict():
        gate(x).sum().backward()
    assert called() == []
    assert not caplog.records
    (plan,) = fm.explain(fm.Sequential(gate), arch=90).groups[0].explanation.plans
    assert {a.reason for a in plan.attempts if a.status is Status.CONSTRAINT} == {
        "out_features is 1, a product for plain PyTorch"
    }


def test_the_shared_expert_of_a_layer():
    layer, x = fm.MoE(H, I, 4, 2, shared_intermediate=24, shared_gate=True, sm_margin=3, dtype=BF16), rows()
    with fm.disabled("*"):
        expected = outcome(layer, x)
    stand_ins.calls.clear()
    with fm.strict():
        assert_close(outcome(layer, x), expected)
    assert len(called("grouped_gemm_activation")) == len(called("grouped_gemm_activation_backward")) == 2
    assert {what["options"].sm_margin for what in called("grouped_wgrad")} == {3}
    assert len(called("grouped_wgrad")) == 4


def test_a_scale_next_to_a_dense_layer_is_fused_with_the_activation():
    fc1, act, fc2 = mlp(bias=False)
    probs = torch.rand(15).requires_grad_()
    plan = both_ways(fm.Sequential(fc1, act, fm.Scale("probs"), fc2), rows(), probs=probs)
    apart = {step.rule: step.ops for step in plan.steps if step.rule in ("sm90.activation", "sm90.dactivation")}
    assert apart == {
        "sm90.activation": ("1.SwiGLU", "2.Scale"), "sm90.dactivation": ("2.ScaleGrad", "2.DScale", "1.DSwiGLU"),
    }  # fmt: skip
    assert not plan.unfused


def test_autocast():
    chain, x = mlp(dtype=torch.float32), rows(dtype=torch.float32)
    with torch.autocast("cpu", BF16), fm.strict():
        y = chain(x)
    y.sum().backward()
    assert y.dtype is BF16
    assert all(p.grad.dtype is torch.float32 and p.grad.any() for p in chain.parameters())
    assert called().count("grouped_wgrad") == 2


def test_quantized_layers_miss_nothing():
    chain, x = mlp(bias=False), rows(2, 16)
    with fm.recipe("mxfp8"), fm.strict():
        chain(x).sum().backward()
    assert {*called()} == {"quantize_format", "activation", "activation_backward"}  # no kernel multiplies


# ---- offsets of one group


def test_offsets_are_views_of_one_table():
    offsets = [one_group.offsets_of_one_group(rows, torch.device("cpu")) for rows in (0, 1, 4096)]
    assert [t.tolist() for t in offsets] == [[0], [1], [4096]]
    assert len({t.untyped_storage().data_ptr() for t in offsets}) == 1
    assert {(t.dtype, t.shape) for t in offsets} == {(torch.int32, (1,))}


def test_more_rows_than_the_table_has(monkeypatch):
    monkeypatch.setattr(one_group, "_TABLE_ROWS", 8)
    assert one_group.offsets_of_one_group(7, torch.device("cpu")) is not None
    assert one_group.offsets_of_one_group(8, torch.device("cpu")) is None
    both_ways(mlp(), rows(15))


def test_functions_of_a_plan_bind_once(monkeypatch):
    chain, x = mlp(), rows()
    chain(x)
    stand_ins.install(lambda module, name, _: monkeypatch.setattr(module, name, None))
    chain(x)
