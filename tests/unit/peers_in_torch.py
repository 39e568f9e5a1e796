"""The interfaces of QuACK and SonicMoE that are called here, in plain torch: their argument names and layouts."""

import itertools
from types import SimpleNamespace

import torch


def quack_in_torch():
    """What the adapter calls of QuACK 0.6.5 in plain torch: its argument names, its alternating gate and up."""

    def gemm(A, B, out=None, bias=None, *, cu_seqlens_m=None, cu_seqlens_k=None, tuned=True):
        ends = (cu_seqlens_k if cu_seqlens_m is None else cu_seqlens_m).tolist()
        spans = [slice(first, end) for first, end in itertools.pairwise(ends)]
        if cu_seqlens_m is None:
            return torch.stack([A[:, span] @ B[span] for span in spans])
        return torch.cat([A[s] @ B[e] + (0 if bias is None else bias[e]) for e, s in enumerate(spans)])

    def glu(p, activation):
        gate, up = p[..., ::2], p[..., 1::2]
        if activation == "swiglu":
            return gate * gate.sigmoid() * up
        assert activation == "swiglu_oai"
        return gate * (1.702 * gate).sigmoid() * (up + 1)

    def gemm_gated(A, B, C=None, bias=None, activation=None, *, cu_seqlens_m=None, tuned=True):
        p = gemm(A, B, bias=bias, cu_seqlens_m=cu_seqlens_m)
        return p, glu(p, activation)

    def gemm_dgated(
        A, B, PreAct, activation=None, *, colvec_scale=None, colvec_reduce=False, cu_seqlens_m=None,
        dynamic_scheduler=True, tuned=True,
    ):  # fmt: skip
        d, p = gemm(A, B, cu_seqlens_m=cu_seqlens_m), PreAct.detach().requires_grad_()
        scale = 1 if colvec_scale is None else colvec_scale[:, None]
        with torch.enable_grad():
            activated = glu(p, activation)
        (grad_p,) = torch.autograd.grad(activated, p, d * scale)
        activated = activated.detach()
        return (grad_p, activated * scale) + ((d * activated).sum(-1),) * colvec_reduce

    return SimpleNamespace(gemm=gemm, gemm_gated=gemm_gated, gemm_dgated=gemm_dgated)


def sonic_in_torch():
    """What is called of SonicMoE 0.1.2 on given routing, with weights as it wants them: permuted views."""

    def moe_general_routing_inputs(
        x, router_scores, token_indices, expert_indices, w1, b1, w2, b2, E, stream_id, activation_type
    ):
        assert (b1, b2, stream_id, activation_type) == (None, None, 0, "swiglu")
        assert token_indices.dtype is expert_indices.dtype is torch.int32
        assert (token_indices.diff() >= 0).all(), "it takes slots in the order of their tokens"
        assert w1.stride(1) == w2.stride(1) == 1, "(2 I, H, E) and (H, I, E), views of (E, out, in)"
        y = torch.zeros_like(x)
        for expert in range(E):
            slots = torch.where(expert_indices == expert)[0]
            token = token_indices[slots]
            h = x[token] @ w1[..., expert].T
            rows = torch.nn.functional.silu(h[:, ::2]) * h[:, 1::2] @ w2[..., expert].T
            y = y.index_add(0, token, rows * router_scores[slots, None])
        return y, expert_indices.long().bincount(minlength=E)

    functional = SimpleNamespace(moe_general_routing_inputs=moe_general_routing_inputs)
    functional.forward, functional.backward = SimpleNamespace(gemm_gated=None), SimpleNamespace(gemm=None)
    return {
        "sonicmoe": SimpleNamespace(functional=functional),
        "sonicmoe.functional": functional,
        "sonicmoe.enums": SimpleNamespace(ActivationType=SimpleNamespace(SWIGLU="swiglu")),
    }
