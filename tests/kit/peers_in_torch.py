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


def sonic_in_torch(logits_dtype=None):
    """What is called of SonicMoE 0.1.2.post1, with weights as it wants them: permuted views.

    ``logits_dtype`` rounds the logits. ``calls`` of the functional module lists, per call, whether its products are
    tuned, and whether it is for inference.
    """

    def logits_of(x, router_w):
        logits = x @ router_w.T
        return logits if logits_dtype is None else logits.to(logits_dtype).to(logits.dtype)

    class TC_Softmax_Topk_Router_Function:  # noqa: N801 its name
        @staticmethod
        def apply(router_logits, E, K, is_softmax_over_topk, norm_topk_probs):
            assert (router_logits.shape[1], is_softmax_over_topk, norm_topk_probs) == (E, True, False)
            rounded = router_logits if logits_dtype is None else router_logits.to(logits_dtype).to(router_logits.dtype)
            logits, index = rounded.topk(K, dim=-1)
            return logits.softmax(-1), index.int()

    def moe_TC_softmax_topk_layer(
        x, router_w, w1, b1, w2, b2, K, stream_id, activation_type="swiglu", is_inference_mode_enabled=False
    ):
        assert (b1, b2, stream_id, activation_type) == (None, None, 0, "swiglu")
        assert w1.stride(1) == w2.stride(1) == 1, "(2 I, H, E) and (H, I, E), views of (E, out, in)"
        assert is_inference_mode_enabled != torch.is_grad_enabled()
        functional.calls.append((functional.forward.gemm.keywords["tuned"], is_inference_mode_enabled))
        assert functional.backward.gemm_dgated.keywords["tuned"] == functional.calls[-1][0]
        experts, logits = len(router_w), logits_of(x, router_w)
        logits_TK, index = logits.topk(K, dim=-1)
        weight, y = logits_TK.softmax(-1), torch.zeros_like(x)
        for expert in range(experts):
            token, slot = torch.where(index == expert)
            h = x[token] @ w1[..., expert].T
            rows = torch.nn.functional.silu(h[:, ::2]) * h[:, 1::2] @ w2[..., expert].T
            y = y.index_add(0, token, rows * weight[token, slot, None])
        return y, logits, index.flatten().bincount(minlength=experts)

    functional = SimpleNamespace(
        moe_TC_softmax_topk_layer=moe_TC_softmax_topk_layer,
        TC_Softmax_Topk_Router_Function=TC_Softmax_Topk_Router_Function,
        forward=SimpleNamespace(gemm=None, gemm_gated=None),
        backward=SimpleNamespace(gemm=None, gemm_dgated=None),
        calls=[],
    )
    return {
        "sonicmoe": SimpleNamespace(functional=functional),
        "sonicmoe.functional": functional,
        "sonicmoe.enums": SimpleNamespace(ActivationType=SimpleNamespace(SWIGLU="swiglu")),
    }
