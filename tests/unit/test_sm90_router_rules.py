"""The rules for sm_90 of the router, on the CPU: stand-ins compute what the kernels do."""

import inspect
import itertools

import pytest
import torch
from kit import sm90_stand_ins as stand_ins
from kit.toy import only_plan, outcome, rules_used
from test_sm90_rules import BF16, assert_close, called, hopper_machine  # noqa: F401  (a fixture)

import fusedmoe as fm
from fusedmoe import FusionError
from fusedmoe.kernels.sm90 import router as router_functions

T, K, E, H, I = 37, 3, 8, 32, 16  # noqa: E741
pytestmark = pytest.mark.usefixtures("builtin_rules")

EXPERTS = ["sm90.gathered_gemm_activation", "sm90.grouped_gemm", "sm90.combine"]
OPTIONS = {
    "softmax": {},
    "not renormalised": {"renormalize": False, "scale": 2.5},
    "topk_softmax": {"score": "topk_softmax", "scale": 2.5},
    "sigmoid": {"score": "sigmoid", "scale": 2.5},
    "sigmoid, not renormalised": {"score": "sigmoid", "renormalize": False},
    "deepseek": {"score": "sigmoid", "num_groups": 4, "top_groups": 2},
    "corrected": {"balance_bias": True},
    "bias": {"bias": True},
}


class Observe(fm.Op):
    """Adds a number to the rows that depends on the router's other values: most to the last columns."""

    def __init__(self, *names):
        super().__init__()
        self.runtime_inputs = names

    def compute(self, x, *values):
        total = sum((value * torch.linspace(1, 2, value.numel()).view_as(value)).sum() / len(x) for value in values)
        return (x + total * torch.linspace(0, 1, x.shape[1])).to(x.dtype)


def router(dtype=BF16, **options):
    torch.manual_seed(0)
    made = fm.Router(H, E, K, dtype=dtype, **options)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if made.balance_bias is not None:
        made.balance_bias.uniform_(-0.2, 0.2)
    return made


def layer(dtype=BF16, *observers, of=BF16, **options):
    return fm.Sequential(
        router(dtype, **options), fm.Dispatch(), fm.GroupedLinear(E, H, 2 * I, dtype=of), fm.SwiGLU(),
        fm.Scale("probs"), fm.GroupedLinear(E, I, H, dtype=of), fm.Combine(None), *observers,
    )  # fmt: skip


def tokens(dtype=BF16, requires_grad=True):
    torch.manual_seed(1)
    return torch.randn(T, H, dtype=dtype).requires_grad_(requires_grad)


def both_ways(chain, x):
    with fm.disabled("*"):
        expected = outcome(chain, x)
    stand_ins.calls.clear()
    got = outcome(chain, x)
    assert_close(got, expected)
    return rules_used(only_plan(chain, x))


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_router_and_the_sort_are_one_step_in_each_direction(options, dtype):
    used = both_ways(layer(dtype, **options), tokens())
    assert used[:4] == ["sm90.router_dispatch", *EXPERTS]
    assert used[-1] == "sm90.router_backward"
    assert not {"sm90.dispatch", "sm90.ddispatch", "sm90.dispatch_weight_grad"} & {*used}
    assert called("route") == [{"counted": True}]
    assert called("logits_grad") == [{"blocks": router_functions.blocks_for(dtype), "rows": True}]
    assert {"scale": False, "adds": True} in called("sum_slots")
    assert not {"slot_values", "offsets_from_splits"} & {*called()}  # the sort writes the offsets


@pytest.mark.parametrize("observed", [("router_logits",), ("probs_sum",), ("z_sum", "probs_sum", "router_logits")])
@pytest.mark.parametrize("options", [{}, {"score": "sigmoid"}, {"score": "topk_softmax", "bias": True}], ids=str)
def test_values_for_losses(options, observed):
    chain = layer(BF16, Observe(*observed), **options)
    used = both_ways(chain, tokens())
    assert "sm90.router_dispatch" in used
    assert "sm90.router_backward" in used
    assert called("router")[0]["sums"] is ("probs_sum" in observed)


class AfterOne(Observe):
    """The gradient of its value is a view that begins one number after the start of another tensor."""

    def compute(self, x, value):
        return super().compute(x, torch.cat([value.new_ones(1), value.flatten()]))


def test_a_gradient_of_logits_at_an_address_that_kernels_cannot_read():
    assert both_ways(layer(BF16, AfterOne("router_logits")), tokens())[-1] == "sm90.router_backward"


def test_any_number_of_groups_that_are_all_chosen():
    """A choice among all groups is a choice among all experts: the kernels have 32 groups at most."""
    made = fm.Router(H, 64, K, dtype=BF16, num_groups=64, top_groups=64)
    assert both_ways(fm.Sequential(made, Observe("router_logits")), tokens())[0] == "sm90.router"
    some = fm.Router(H, 64, K, dtype=BF16, num_groups=64, top_groups=63)
    plan = only_plan(fm.Sequential(some, Observe("router_logits")), tokens())
    assert "3 chosen experts, 64 groups: expected at most 32 of each" in {a.reason for a in plan.attempts}


def test_a_router_alone():
    used = both_ways(fm.Sequential(router(), Observe("router_logits", "probs_sum")), tokens())
    assert used == ["sm90.router", "sm90.router_backward"]


@pytest.mark.parametrize("chain", [layer, lambda: fm.Sequential(router(), Observe("router_logits"))])
def test_the_sum_of_two_gradients_of_the_tokens_is_a_launch(chain):
    x = tokens()
    with_x, without_x = (only_plan(chain(), t).steps[-1].launches for t in (x, x.detach()))
    assert with_x == 1 + 2 + 2  # the logits, the weight, the tokens
    assert without_x == 1 + 2


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_router_called_alone(options, dtype):
    """No gradient of the rows arrives: the product is the gradient of the tokens."""
    made, x = router(dtype, **options), tokens()

    def results():
        routing = made(x)
        torch.manual_seed(2)
        loss = sum((value * torch.randn_like(value)).sum() for value in routing[1:])
        gradients = torch.autograd.grad(loss, [x, *made.parameters()])
        return routing._asdict() | dict(zip(("x", "weight", "bias"), gradients, strict=False))

    with fm.disabled("*"):
        expected = results()
    stand_ins.calls.clear()
    with fm.strict():
        assert_close(results(), expected)
    assert called() == ["router", "logits_grad", "router_wgrad", "router_dgrad"]
    assert called("router")[0]["sums"] is False


@pytest.mark.parametrize("frozen", [*itertools.product([False, True], repeat=3)], ids=str)
def test_frozen_parts(frozen):
    of_router, of_experts, of_x = frozen
    chain = layer(bias=True)
    for name, parameter in chain.named_parameters():
        parameter.requires_grad_(not (of_router if name.startswith("0.") else of_experts))
    if all(frozen):
        return
    used = both_ways(chain, tokens(requires_grad=not of_x))
    needed = not of_router or not of_x
    assert ("sm90.router_backward" in used) is needed
    assert (called("router_wgrad") != []) is not of_router
    assert (called("router_dgrad") != []) is not of_x


def test_a_frozen_weight_with_a_trained_bias():
    chain = layer(bias=True)
    chain[0].weight.requires_grad_(False)
    assert both_ways(chain, tokens())[-1] == "sm90.router_backward"
    assert "router_wgrad" not in called()
    assert "router_dgrad" in called()


def test_the_parts_of_a_span_that_another_rule_takes():
    """Without the rule of the whole span, the remaining steps are those of the other rules and plain ones."""
    with fm.disabled("sm90.router_dispatch"):
        used = both_ways(layer(), tokens())
    assert used[:2] == ["sm90.router", "sm90.dispatch"]
    with fm.disabled("sm90.router_backward"):
        used = both_ways(layer(), tokens())
    assert used[-2:] == ["sm90.dispatch_weight_grad", "sm90.ddispatch"]


def test_weights_that_another_op_reads():
    """Their gradient is a sum: the step begins after `DispatchWeightGrad`."""
    used = both_ways(layer(BF16, Observe("expert_weight")), tokens())
    assert used[-1] == "sm90.router_backward"
    assert called("logits_grad")[0]["rows"] is False


def test_no_tokens():
    chain = layer()
    x = torch.randn(0, H, dtype=BF16, requires_grad=True)
    stand_ins.calls.clear()
    with fm.strict():
        chain(x).sum().backward()
    assert x.grad.shape == (0, H)
    assert not {"router", "route", "logits_grad"} & {*called()}


def test_fp16_runs_forward_alone():
    chain, x = layer(torch.float16, of=torch.float16), tokens(torch.float16)
    used = both_ways(chain, x)
    assert "sm90.router_dispatch" in used
    assert "sm90.router_backward" not in used


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"hidden": 36}, "hidden 36 is not a multiple of 8"),
        ({"experts": 513}, "513 experts, over 512"),
        ({"dtype": torch.float16}, "the router's weight is float16: expected bfloat16 or float32"),
    ],
)
def test_constraints(settings, reason):
    hidden, experts = settings.get("hidden", H), settings.get("experts", E)
    chain = fm.Sequential(fm.Router(hidden, experts, 2, dtype=settings.get("dtype", BF16)), fm.Dispatch(experts))
    with fm.strict(), pytest.raises(FusionError, match=reason):
        chain(torch.randn(5, hidden, dtype=BF16))


def test_a_balance_bias_that_was_cast():
    chain = layer(score="sigmoid")
    chain[0].balance_bias.data = chain[0].balance_bias.data.to(BF16)
    with fm.strict(), pytest.raises(FusionError, match=r"the balance bias is torch\.bfloat16, not float32"):
        chain(tokens())


def test_a_weight_with_strides():
    chain = layer()
    chain[0].weight.data = torch.randn(H, E, dtype=BF16).T
    with fm.strict(), pytest.raises(FusionError, match="the router's weight has strides"):
        chain(tokens())


def wide_layer():
    """Its products take long enough that a sum over slots can run beside them."""
    torch.manual_seed(0)
    return fm.Sequential(
        router(), fm.Dispatch(), fm.GroupedLinear(E, H, 1024, dtype=BF16), fm.SwiGLU(), fm.Scale("probs"),
        fm.GroupedLinear(E, 512, H, dtype=BF16), fm.Combine(None),
    )  # fmt: skip


def test_the_sum_over_slots_runs_beside_a_weight_gradient(monkeypatch):
    chain, x = wide_layer(), torch.randn(T, H, dtype=BF16, requires_grad=True)
    assert not only_plan(chain, x).beside  # it is short
    alone = outcome(chain, x)
    monkeypatch.setattr("fusedmoe.builtin_rules.rows.dispatch.SHORTEST_US", 0.0)
    chain = wide_layer()
    ((light, carrier, sms),) = only_plan(chain, x).beside
    assert (light, carrier) == ("sm90.router_backward", "sm90.gathered_wgrad_x")
    assert 16 <= sms <= 56
    stand_ins.calls.clear()
    assert_close(outcome(chain, x), alone)
    names = called()[called().index("gathered_gemm_activation_backward") :]
    assert [n for n in names if n in ("sum_slots", "beside", "gathered_wgrad_dy", "gathered_wgrad_x")] == [
        "sum_slots", "beside", "gathered_wgrad_x", "gathered_wgrad_dy",
    ]  # fmt: skip
    assert called("sum_slots")[-1] == {"scale": False, "adds": True, "beside_sms": sms}


def test_nothing_runs_beside_a_product_of_a_copy(monkeypatch):
    monkeypatch.setattr("fusedmoe.builtin_rules.rows.dispatch.SHORTEST_US", 0.0)
    chain, x = wide_layer(), torch.randn(T, H, dtype=BF16, requires_grad=True)
    dy = torch.randn(H, dtype=BF16).expand(T, H)  # the kernels cannot read it
    with fm.disabled("sm90.gathered_wgrad_x", "sm90.grouped_wgrad"):
        for grad, beside in ((dy, 0), (dy.contiguous(), 1)):
            y = chain(x)
            stand_ins.calls.clear()
            y.backward(grad)
            assert len(called("beside")) == beside


def test_stand_ins_have_the_signatures_of_the_kernels(monkeypatch):
    monkeypatch.undo()
    kernels = {n: f for n, f in vars(router_functions).items() if n.startswith("bind_") and f.__module__ ==
               router_functions.__name__}  # fmt: skip
    assert kernels.keys() == stand_ins.ROUTER.keys()
    for name, kernel in kernels.items():
        assert kernel is not stand_ins.ROUTER[name]
        assert len(inspect.signature(kernel).parameters) == len(inspect.signature(stand_ins.ROUTER[name]).parameters)
