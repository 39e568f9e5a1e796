"""In fp16, routing weights are applied to the experts' output: before the product they would underflow."""

import pytest
import torch
from kit.compare import assert_bitwise

import fusedmoe as fm

E, H, I, TOKENS, K = 4, 64, 64, 128, 2  # noqa: E741
FP16 = torch.float16


def experts(*, late=False, bias=False, dtype=FP16, lora=False):
    """Experts whose activations are near 1e-3."""
    torch.manual_seed(0)
    down = fm.GroupedLinear(E, I, H, bias=bias, dtype=dtype)
    chain = fm.Sequential(
        fm.Dispatch(E),
        fm.GroupedLinear(E, H, 2 * I, bias=False, dtype=dtype),
        fm.SwiGLU(),
        *([] if late else [fm.Scale("probs")]),
        fm.GroupedLoRA(down, rank=4) if lora else down,
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


def test_fp16_has_the_bits_of_weights_in_combine_and_the_accuracy_of_fp16():
    got = results(experts())
    assert_bitwise(got, results(experts(late=True)))
    want = results(experts().double(), torch.float64)[-1]  # the same weights
    # the roundings of gate, up, activation and gradient, of 2^-12 on average each; with early weights 4e-3
    assert (got[-1].double() - want).norm() < 4 * 2**-11 * want.norm()


def explained(chain, dtype=FP16, **settings):
    x = torch.zeros(TOKENS, H, dtype=dtype, requires_grad=True)
    index, weight = torch.arange(TOKENS * K).view(TOKENS, K) % E, torch.ones(TOKENS, K, requires_grad=True)
    return chain.explain(x, expert_index=index, expert_weight=weight, **settings)


NOT_LINEAR = fm.Sequential(fm.Dispatch(E), fm.Scale("probs"), fm.SquaredReLU(), fm.Combine(None))


@pytest.mark.parametrize(
    ("chain", "dtype", "autocast", "moves"),
    [
        (experts(), FP16, False, True),
        (experts(dtype=torch.float32), torch.float32, True, True),
        (experts(lora=True), FP16, False, True),  # LoRA is linear too
        (experts(dtype=torch.bfloat16), torch.bfloat16, False, False),
        (experts(dtype=torch.float32), torch.float32, False, False),
        (experts(bias=True), FP16, False, False),  # which the weights must not scale
        (NOT_LINEAR, FP16, False, False),
    ],
    ids=["fp16", "autocast", "lora", "bf16", "fp32", "bias", "not linear"],
)
def test_which_chains_apply_the_weights_late(chain, dtype, autocast, moves):
    with torch.autocast("cpu", FP16, enabled=autocast):
        assert ("Scale" in str(explained(chain, dtype))) is not moves
