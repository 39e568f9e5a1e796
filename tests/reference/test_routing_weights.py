"""In fp16, routing weights are applied to the experts' output: before the product they would underflow."""

import pytest
import torch

import fusedmoe as fm
from fusedmoe.call.routing_weights import applied_late

E, H, I, TOKENS, K = 4, 64, 64, 128, 2  # noqa: E741
FP16 = torch.float16


def experts(*, late=False, bias=False, dtype=FP16):
    """Experts whose activations are near 1e-3."""
    torch.manual_seed(0)
    chain = fm.Sequential(
        fm.Dispatch(E),
        fm.GroupedLinear(E, H, 2 * I, bias=False, dtype=dtype),
        fm.SwiGLU(),
        *([] if late else [fm.Scale("probs")]),
        fm.GroupedLinear(E, I, H, bias=bias, dtype=dtype),
        fm.Combine("probs" if late else None),
    )
    with torch.no_grad():
        chain[1].weight.mul_(0.05)
    return chain


def results(chain, dtype=FP16):
    """The output, and the gradients of tokens, routing weights and parameters."""
    seeded = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(TOKENS, H, generator=seeded).to(FP16).to(dtype) for _ in range(2))
    index = torch.rand(TOKENS, E, generator=seeded).topk(K).indices
    weight = torch.rand(TOKENS, K, generator=seeded).add_(0.5).mul_(1e-2)
    weight = weight.double() if dtype is torch.float64 else weight
    x.requires_grad_(), weight.requires_grad_()
    y = chain(x, expert_index=index, expert_weight=weight)
    y.backward(dy)
    return [y.detach(), x.grad, weight.grad, *[p.grad for p in chain.parameters()]]


def test_fp16_has_the_bits_of_weights_in_combine():
    for early, late in zip(results(experts()), results(experts(late=True)), strict=True):
        assert torch.equal(early, late)


def test_the_gradient_of_the_last_product_has_the_accuracy_of_fp16():
    exact = experts().double()  # the same weights
    want, got = results(exact, torch.float64)[-1], results(experts())[-1]
    # the roundings of gate, up, activation and gradient, of 2^-12 on average each; with early weights 4e-3
    assert (got.double() - want).norm() < 4 * 2**-11 * want.norm()


def labels(chain, dtype=FP16, **settings):
    x = torch.zeros(TOKENS, H, dtype=dtype, requires_grad=True)
    index, weight = torch.arange(TOKENS * K).view(TOKENS, K) % E, torch.ones(TOKENS, K, requires_grad=True)
    plan = chain.explain(x, expert_index=index, expert_weight=weight, **settings)
    return str(plan), plan


@pytest.mark.parametrize(
    ("chain", "dtype", "moves"),
    [
        (experts, FP16, True),
        (lambda: experts(dtype=torch.bfloat16), torch.bfloat16, False),
        (lambda: experts(dtype=torch.float32), torch.float32, False),
        (lambda: experts(bias=True), FP16, False),  # which the weights must not scale
    ],
    ids=["fp16", "bf16", "fp32", "bias"],
)
def test_which_chains_apply_the_weights_late(chain, dtype, moves):
    text, _ = labels(chain(), dtype)
    assert ("Scale" in text) is not moves


def test_autocast_to_fp16_applies_them_late():
    with torch.autocast("cpu", FP16):
        text, _ = labels(experts(dtype=torch.float32), torch.float32)
    assert "Scale" not in text


def test_lora_is_linear_too():
    chain = experts()
    chain[4] = fm.GroupedLoRA(chain[4], rank=4)
    assert "Scale" not in labels(chain)[0]


def test_an_op_between_that_is_not_linear_keeps_the_scale():
    chain = fm.Sequential(fm.Dispatch(E), fm.Scale("probs"), fm.SquaredReLU(), fm.Combine(None))
    assert "Scale" in labels(chain)[0]


def test_all_of_it_runs_fused_on_hopper():
    _, plan = labels(experts(), arch=90)
    ((_, part),) = plan.parts
    assert not part.unfused


def test_the_combine_keeps_what_it_has_from_expert_parallelism():
    combine = fm.Combine(None)
    combine.output_dtype, combine.runtime_inputs = torch.float32, (*combine.runtime_inputs, "row_dtype")
    nodes = [fm.ops.op.Node(str(i), op) for i, op in enumerate((fm.Scale("probs"), combine))]
    ((label, made),) = applied_late(nodes, FP16, ())
    assert label == "1"
    assert (made.weights, made.output_dtype) == ("probs", torch.float32)
    assert made.runtime_inputs == ("row_of_slot", "slot_of_row", "probs", "row_dtype")
