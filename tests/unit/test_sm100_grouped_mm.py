"""The rules for Blackwell that let torch compute bf16 products, on a CPU: the kernel of the tail is a stand-in."""

import pytest
import torch
from kit.sm90_machine import assert_close
from kit.sm90_stand_ins import calls
from kit.sm100_machine import BF16, E, H, I, blackwell_machine  # noqa: F401  (a fixture)
from kit.toy import only_plan, outcome, rules_used, status

import fusedmoe as fm
from fusedmoe import Status
from fusedmoe.kernels.torch import grouped_gemm

pytestmark = pytest.mark.usefixtures("builtin_rules", "blackwell_machine")

MM, MM_DGRAD = "sm100.grouped_mm", "sm100.grouped_mm_dgrad"
SPLITS = (5, 0, 9, 1)
ROWS = 18  # three of them belong to no expert


@pytest.fixture(autouse=True)
def a_tail_that_is_not_written(monkeypatch):
    """As on a GPU: NaN shows it."""
    plain = torch.nn.functional.grouped_mm

    def grouped_mm(a, b, *, offs):
        y = plain(a, b, offs=offs)
        if y.dim() == 2:
            y[int(offs[-1]) :] = torch.nan
        return y

    monkeypatch.setattr(grouped_gemm.F, "grouped_mm", grouped_mm)
    calls.clear()


def experts(bias=False, scale=True, **settings):
    return fm.Sequential(
        fm.GroupedLinear(E, H, 2 * I, bias=bias, dtype=BF16),
        fm.SwiGLU(),
        *([fm.Scale("probs")] if scale else []),
        fm.GroupedLinear(E, I, H, bias=bias, dtype=BF16),
        **settings,
    )


def operands(count=ROWS, splits=SPLITS, width=H, dtype=BF16):
    x = torch.randn(count, width, dtype=dtype)
    x[sum(splits) :] = torch.nan
    return x.requires_grad_(), {"splits": torch.tensor(splits), "probs": torch.rand(count).requires_grad_()}


def both_ways(chain, x, **named):
    with fm.disabled("*"):
        expected = outcome(chain, x, **named)
    calls.clear()
    got = outcome(chain, x, **named)
    assert_close(got, expected)
    for name in ("y", "x", "probs"):
        assert name not in got or not got[name][sum(SPLITS) :].any()
    return only_plan(chain, x, **named)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_an_expert_mlp(bias):
    x, named = operands()
    plan = both_ways(experts(bias), x, **named)
    sums = ["sm100.column_sums"] if bias else []
    assert rules_used(plan) == [
        MM, "sm100.activation", MM, *sums, MM_DGRAD, "sm100.dactivation", *sums, MM_DGRAD,
    ]  # fmt: skip
    assert {op for step in plan.unfused for op in step.ops} == {"3.Wgrad", "0.Wgrad"}
    assert [name for name, _ in calls].count("zero_tail") == 4


def test_a_routed_layer():
    chain = fm.Sequential(fm.Dispatch(), *experts(), fm.Combine(None))
    index = torch.randint(E + 1, (9, 2))
    x = torch.randn(9, H, dtype=BF16, requires_grad=True)
    named = {"expert_index": index, "expert_weight": torch.rand(9, 2).requires_grad_()}
    with fm.disabled("*"):
        expected = outcome(chain, x, **named)
    assert_close(outcome(chain, x, **named), expected)
    assert {MM, MM_DGRAD, "sm100.dispatch", "sm100.combine"} < {*rules_used(only_plan(chain, x, **named))}


def test_gradients_with_other_strides():
    x, named = operands()
    chain = experts()
    y = chain(x, **named)
    with fm.disabled("*"):
        want = torch.autograd.grad(chain(x, **named).sum(), x)[0]
    got = torch.autograd.grad(y.sum(), x)[0]  # an expanded gradient
    assert_close({"x": got}, {"x": want})


def test_no_rows(caplog):
    x, named = operands(0, (0, 0, 0, 0))
    with fm.strict():
        experts()(x, **named).sum().backward()
    assert {name for name, _ in calls} <= {"offsets_from_splits"}
    assert not caplog.records


@pytest.mark.parametrize(
    ("chain", "x", "reason"),
    [
        (experts().half(), operands(dtype=torch.float16)[0], "input is float16, not bfloat16"),
        (
            fm.Sequential(fm.GroupedLinear(E, 12, 16, dtype=BF16)),
            operands(width=12)[0],
            "in_features 12 is not a multiple of 8",
        ),
        (experts(sm_margin=8), operands()[0], "sm_margin 8: torch's product takes all SMs"),
    ],
    ids=["fp16", "width", "sm_margin"],
)
def test_constraints(chain, x, reason):
    _, named = operands()
    if len(chain) == 1:
        del named["probs"]
    plan = only_plan(chain, x, **named)
    assert status(plan, MM) == (Status.CONSTRAINT, reason)
    assert not {MM, MM_DGRAD} & {*rules_used(plan)}


def test_a_subclass_of_a_tensor_runs_in_plain_pytorch():
    class Mine(torch.Tensor):
        pass

    x, named = operands()
    chain = experts(scale=False)
    del named["probs"]
    want = chain(x, **named)
    calls.clear()
    got = chain(x.detach().as_subclass(Mine), **named)
    assert [name for name, _ in calls].count("zero_tail") < 2  # not that of the first layer
    assert torch.equal(torch.Tensor(got.detach().float())[: sum(SPLITS)], want.detach().float()[: sum(SPLITS)])


def test_quantized_operands():
    x, named = operands()
    with fm.recipe("fp8_block"):
        plan = only_plan(experts(), x, **named)
    assert not {MM, MM_DGRAD} & {*rules_used(plan)}
    assert status(plan, MM) == (Status.CONSTRAINT, "takes no fp8 e4m3 128x128 and fp8 e4m3 1x128 operands")
