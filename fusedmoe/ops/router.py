"""`Router` chooses the experts of each token; its backward steps.

Axes: T tokens, E experts, K chosen experts per token, H hidden.

The backward pass has two parts. `RouterLogitsGrad` computes the gradient of the logits from the gradients of all values
that the router provides. The other steps are products with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedmoe.base.autocast import without_autocast
from fusedmoe.base.checks import (
    FINITE,
    FLAG,
    NOT_NEGATIVE,
    POSITIVE_INTEGER,
    TENSOR,
    Check,
    check_factory,
    instance,
    one_of,
    said,
)
from fusedmoe.base.errors import InputError
from fusedmoe.numerics.expert_rows import rows_per_expert
from fusedmoe.ops.op import BackwardOp, Op, SpecLike, TensorSpec, caller

SCORES = ("softmax", "topk_softmax", "sigmoid")

_CHOICE = {"num_experts", "top_k", "num_groups", "top_groups"}  # settings that `Router._check_choice` checks together
_NOT_ZERO = 1e-20  # added to a sum of scores before a division by it


class Routing(NamedTuple):
    """The result of a `Router`, on the device. Floats are fp32 (fp64 for fp64 tokens)."""

    expert_index: Tensor  # (T, K) int64: the chosen experts
    expert_weight: Tensor  # (T, K): the weights of the chosen experts
    logits: Tensor  # (T, E)
    probs: Tensor  # (T, E), with rows that sum to 1: the softmax of the logits, or the normalised sigmoid scores


class MoEStats(NamedTuple):
    """Losses and load of a call, as tensors on the device. They are not read on the host or stored on the module.

    Losses and logits are fp32 (fp64 for fp64 tokens).

    Attributes
    ----------
    load_balancing_loss : Tensor
        ``E * sum over e of f[e] * p[e]``, where f[e] is the fraction of the routed rows that go to expert e, and p[e]
        its mean probability; 1 for an even load. 0-d; gradients flow through p. Source: Fedus et al., "Switch
        Transformers", section 2.2. Megatron-Core, MegaBlocks and SonicMoE use the same definition.
        ``load_balancing_loss_func`` of Hugging Face transformers divides by the tokens instead of the routed rows, and
        so is K times as large. To keep its coefficient, multiply by K or call `transformers_load_balancing_loss`.
    z_loss : Tensor
        ``mean over tokens of logsumexp(logits)^2``. 0-d. Source: Zoph et al., "ST-MoE", section 3.2. transformers,
        Megatron-Core and MegaBlocks use the same definition.
    load : Tensor
        (E,) int64: rows per expert.
    logits : Tensor
        (T, E): the router's logits, for other losses. They hold the autograd graph of the step: do not keep them
        longer than the step.
    """

    load_balancing_loss: Tensor
    z_loss: Tensor
    load: Tensor
    logits: Tensor


class Router(Op):
    """Chooses K of E experts per token. Logits, scores and weights are fp32 (fp64 for fp64 tokens), also in autocast.

    ``logits = x @ weight.T + bias``. ``score`` turns the logits into the weights of the chosen experts.

    Called alone with tokens ``x`` (T, H), the router returns a `Routing`. In a `Sequential` it leaves the rows
    unchanged and provides

    - ``expert_index`` (T, K) int64 and ``expert_weight`` (T, K), for `Dispatch`;
    - ``router_logits`` (T, E);
    - ``probs_sum`` (E,), the sum over the tokens of `Routing.probs`, and ``z_sum`` (), the sum over the tokens of
      ``logsumexp(logits)^2``: the sums that the losses of `MoEStats` need. They are computed only if they are read.

    NaN ranks highest: a token with a NaN among its logits gets K different experts of [0, E), and at least one of its
    weights is NaN. Other tokens are not affected.

    Parameters
    ----------
    hidden, num_experts, top_k
        H, E and K.
    score
        The function that turns logits into weights:

        - ``"softmax"``: softmax over all experts, then the K largest;
        - ``"topk_softmax"``: the K largest logits, then softmax over these (GPT-OSS);
        - ``"sigmoid"``: independent scores; ``balance_bias`` may correct the choice (DeepSeek-V3).
    renormalize
        Divide the chosen weights by their sum. No effect with "topk_softmax".
    scale
        Final factor of the weights (DeepSeek-V3's ``routed_scaling_factor``).
    bias
        Whether the logits have a bias.
    balance_bias
        Whether a correction is added to the scores for the choice of experts, but not to the weights; see
        `update_bias`. None means True with "sigmoid" and False otherwise.
    num_groups, top_groups
        Choose only experts of the ``top_groups`` best of ``num_groups`` groups of neighbouring experts. The score of a
        group is the sum of its two best corrected scores with "sigmoid" (DeepSeek-V3), its best score otherwise
        (DeepSeek-V2).
    device, dtype
        Device and dtype of the parameters.

    Attributes
    ----------
    weight : Parameter
        (E, H).
    bias : Parameter or None
        (E,).
    balance_bias : Tensor or None
        (E,) fp32 buffer, initialised with zeros. It stays in fp32 when the module is cast (``.bfloat16()``,
        ``.to(dtype)``) and when a checkpoint in another dtype is loaded, since bf16 soon rounds steps of 1e-3 away. A
        cast that bypasses the module, such as ``buffer_dtype`` of FSDP1's and DDP's mixed precision, lasts until
        `update_bias`.
    """

    parameter_names = ("weight", "bias", "balance_bias")
    provides = ("expert_index", "expert_weight", "router_logits")
    provides_if_read = ("probs_sum", "z_sum")
    stages: ClassVar[Mapping[str, str]] = {"logits": "router_logits"}
    passes_forward = True
    returns_rows = False
    autocasts = False
    launches = 12
    bias: nn.Parameter | None
    balance_bias: Tensor | None
    _checks: ClassVar[Mapping[str, Check]] = {
        "hidden": POSITIVE_INTEGER,
        "num_experts": POSITIVE_INTEGER,
        "top_k": POSITIVE_INTEGER,
        "score": one_of(SCORES),
        "renormalize": FLAG,
        "scale": FINITE,
        "num_groups": POSITIVE_INTEGER,
        "top_groups": POSITIVE_INTEGER,
        "bias": instance(Tensor, "a tensor").or_none(),
    }
    _fixed = ("hidden", "num_experts")

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        top_k: int,
        score: str = "softmax",
        renormalize: bool = True,
        scale: float = 1.0,
        bias: bool = False,
        balance_bias: bool | None = None,
        num_groups: int = 1,
        top_groups: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        FLAG("Router: bias", bias)
        FLAG.or_none()("Router: balance_bias", balance_bias)
        check_factory("Router", device, dtype)
        self.hidden, self.num_experts, self.top_k = hidden, num_experts, top_k
        self.score, self.renormalize, self.scale = score, renormalize, scale
        self.num_groups, self.top_groups = num_groups, top_groups
        self.weight = nn.Parameter(torch.empty(self.num_experts, self.hidden, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(self.num_experts, device=device, dtype=dtype)) if bias else None
        corrected = score == "sigmoid" if balance_bias is None else balance_bias
        self.register_buffer(
            "balance_bias", torch.zeros(self.num_experts, device=device, dtype=torch.float32) if corrected else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters, uniform within ``1 / sqrt(hidden)``, and set the balance bias to zero."""
        bound = 1 / math.sqrt(self.hidden)
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)
        if self.balance_bias is not None:
            self.balance_bias.zero_()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "balance_bias" and value is not None:
            if not isinstance(value, Tensor) or tuple(value.shape) != (self.num_experts,):
                expected = f"a tensor of shape ({self.num_experts},) or None"
                raise InputError(f"Router: balance_bias: expected {expected}, got {said(value)}")
            value = value.to(torch.float32)
        before = self.__dict__.get(name)
        super().__setattr__(name, value)
        if name in _CHOICE and self.__dict__.keys() >= _CHOICE:  # the constructor has set all of them
            try:
                self._check_choice()
            except InputError:
                if before is not None:
                    super().__setattr__(name, before)
                raise

    def _check_choice(self) -> None:
        """Raise unless ``num_experts``, ``top_k``, ``num_groups`` and ``top_groups`` fit together."""
        experts, groups = self.num_experts, self.num_groups
        if self.top_k > experts:
            raise InputError(f"Router: top_k: expected 1 to num_experts={experts}, got {self.top_k}")
        if experts % groups or self.top_groups > groups:
            raise InputError(
                f"Router: num_groups, top_groups: expected a divisor of num_experts={experts} and at most that "
                f"many, got {groups} and {self.top_groups}"
            )
        if self.top_k > experts // groups * self.top_groups:
            raise InputError(
                f"Router: top_k: expected at most {experts // groups * self.top_groups}, the experts of "
                f"{self.top_groups} of {groups} groups, got {self.top_k}"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Move or cast the module; ``balance_bias`` is moved but keeps its values in fp32."""
        before = self.balance_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self.balance_bias
        if before is not None and after is not None and after.dtype is not torch.float32:
            source = after if before.is_meta else before
            self.balance_bias = source.to(after.device, torch.float32)
        return self

    def forward(self, x: Tensor) -> Routing:  # type: ignore[override]
        """Route tokens ``x`` (T, H)."""
        _, values = caller.run(self, x, {}, None, self.provides)  # without probs, which follow from the logits
        logits_TE = values["router_logits"]
        with without_autocast(x.device):
            probs_TE = self._probs(self.scores(logits_TE))
        return Routing(values["expert_index"], values["expert_weight"], logits_TE, probs_TE)

    forward_in_chain = forward

    if TYPE_CHECKING:
        __call__ = forward

    def values_from(self, x: Tensor, result: Any, names: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
        index_TK, weight_TK, logits_TE, probs_TE = result
        values = {"expert_index": index_TK, "expert_weight": weight_TK, "router_logits": logits_TE}
        if not {*names}.isdisjoint(self.provides_if_read):
            values |= dict(zip(self.provides_if_read, _sums(logits_TE, probs_TE), strict=True))
        return x, values

    def infer(  # type: ignore[override]
        self,
        x: SpecLike,
        weight: SpecLike | None,
        bias: SpecLike | None = None,
        balance_bias: SpecLike | None = None,
        *,
        all_values: bool = False,
    ) -> tuple[TensorSpec, ...]:
        if len(x.shape) != 2 or x.shape[1] != self.hidden:
            raise self.reject("x", f"shape (tokens, {self.hidden})", x.shape)
        self.check_floats("x", x.dtype)
        experts = self.num_experts
        if weight is None or tuple(weight.shape) != (experts, self.hidden):
            got = None if weight is None else weight.shape
            raise self.reject("weight", f"shape ({experts}, {self.hidden})", got)
        for name, one_per_expert in (("bias", bias), ("balance_bias", balance_bias)):
            if one_per_expert is not None and tuple(one_per_expert.shape) != (experts,):
                raise self.reject(name, f"shape ({experts},)", one_per_expert.shape)
        tokens, exact = x.shape[0], torch.promote_types(x.dtype, torch.float32)
        chosen = (tokens, self.top_k)
        specs = TensorSpec(chosen, torch.int64), TensorSpec(chosen, exact), TensorSpec((tokens, experts), exact)
        return (*specs, TensorSpec((experts,), exact), TensorSpec((), exact)) if all_values else specs

    def compute(  # type: ignore[override]
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        balance_bias: Tensor | None = None,
        *,
        all_values: bool = False,
    ) -> tuple[Tensor, ...]:
        logits_TE = self._logits(x, weight, bias)
        scores_TE = self.scores(logits_TE) if all_values or self.score != "topk_softmax" else None
        index_TK, weight_TK = self._choice(logits_TE, scores_TE, balance_bias)
        if scores_TE is None or not all_values:
            return index_TK, weight_TK, logits_TE
        return index_TK, weight_TK, logits_TE, *_sums(logits_TE, self._probs(scores_TE))

    def backward_ops(self) -> tuple[BackwardOp, ...]:
        return RouterLogitsGrad(self), RouterBiasGrad(self), RouterWeightGrad(self), DRouter(self)

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Return the scores of all experts: sigmoid or softmax of the logits."""
        return torch.sigmoid(logits_TE) if self.score == "sigmoid" else torch.softmax(logits_TE, dim=-1)

    def _logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(exact), weight.to(exact), None if bias is None else bias.to(exact))

    def _choice(
        self, logits_TE: Tensor, scores_TE: Tensor | None, balance_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the chosen experts and their weights. "topk_softmax" needs no scores."""
        if self.score == "topk_softmax":
            index_TK = self._choose(logits_TE.detach(), balance_bias)
            weight_TK = torch.softmax(logits_TE.gather(1, index_TK), dim=-1)
        else:
            assert scores_TE is not None
            index_TK = self._choose(scores_TE.detach(), balance_bias)
            weight_TK = scores_TE.gather(1, index_TK)
            if self.renormalize:
                weight_TK = _normalised(weight_TK)
        return index_TK, weight_TK * self.scale

    def _choose(self, ranked_TE: Tensor, balance_bias: Tensor | None) -> Tensor:
        if balance_bias is not None:
            exact = balance_bias.dtype is torch.float32
            ranked_TE = ranked_TE + (balance_bias if exact else balance_bias.to(ranked_TE.dtype))
        if self.top_groups < self.num_groups:
            grouped_TGE = ranked_TE.unflatten(1, (self.num_groups, -1))
            best = min(2 if self.score == "sigmoid" else 1, grouped_TGE.shape[-1])
            group_TG = grouped_TGE.topk(best, dim=-1).values.sum(-1)
            chosen = group_TG.topk(self.top_groups, dim=-1).indices
            left_out_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(1, chosen, False)
            ranked_TE = grouped_TGE.masked_fill(left_out_TG.unsqueeze(-1), -torch.inf).flatten(1)
        return ranked_TE.topk(self.top_k, dim=-1).indices

    def _probs(self, scores_TE: Tensor) -> Tensor:
        return _normalised(scores_TE) if self.score == "sigmoid" else scores_TE

    @torch.no_grad()
    def update_bias(self, load: Tensor, rate: float = 1e-3) -> None:
        """Update by loss-free balancing: ``balance_bias[e] += rate * sign(mean(load) - load[e])``, on the device.

        Call it once per step. The default rate suits "sigmoid". Scores of "softmax" over many experts differ by less
        than this rate: choose a smaller one.

        If ``balance_bias`` was cast to another dtype, it first becomes fp32 again. It remains the same tensor object,
        which DDP and FSDP require. Values that the cast rounded stay rounded.

        Source: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts".

        Parameters
        ----------
        load
            (E,), rows per expert in the step: `MoEStats.load`, summed over micro-batches and ranks.
        rate
            Size of the correction, 0 or more.
        """
        if self.balance_bias is None:
            raise InputError("Router: update_bias: expected a router with balance_bias=True, this one has none")
        TENSOR("Router: load", load)
        NOT_NEGATIVE("Router: rate", rate)
        if tuple(load.shape) != (self.num_experts,):
            raise InputError(f"Router: load: expected shape ({self.num_experts},), got {tuple(load.shape)}")
        load = load.to(torch.float32)
        if self.balance_bias.dtype is not torch.float32:
            self.balance_bias.data = self.balance_bias.data.to(torch.float32)
        self.balance_bias.add_(torch.sign(load.mean() - load), alpha=rate)

    def stats(self, routing: Routing) -> MoEStats:
        """Return the losses and the load of a routing."""
        index_TK, _, logits_TE, probs_TE = routing
        load_E = rows_per_expert(index_TK, self.num_experts)
        return stats_of(load_E, index_TK.numel(), logits_TE, *_sums(logits_TE, probs_TE))

    def extra_repr(self) -> str:
        """Return the settings, as `torch.nn.Module` prints them."""
        return f"hidden={self.hidden}, num_experts={self.num_experts}, top_k={self.top_k}, score={self.score!r}"


def stats_of(load_E: Tensor, slots: int, logits_TE: Tensor, probs_sum_E: Tensor, z_sum: Tensor) -> MoEStats:
    """Return the losses and the load of tokens with ``slots`` chosen experts, from the sums that `Router` provides."""
    tokens, experts = max(logits_TE.shape[0], 1), logits_TE.shape[1]
    # integers divided by a number would have torch's default dtype, which may be bf16
    fraction_E = load_E.to(probs_sum_E.dtype) / max(slots, 1)
    balance = experts * (fraction_E * probs_sum_E / tokens).sum()
    return MoEStats(balance, z_sum / tokens, load_E, logits_TE)


def _normalised(scores: Tensor) -> Tensor:
    return scores / (scores.sum(-1, keepdim=True) + _NOT_ZERO)


def _sums(logits_TE: Tensor, probs_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``probs_sum`` and ``z_sum``."""
    return probs_TE.sum(0), torch.logsumexp(logits_TE, dim=-1).square().sum()


class RouterLogitsGrad(BackwardOp):
    """``dlogits`` (T, E): the gradient of the logits, from those of all values that the router provides.

    With one of these gradients g, and the scores s of `Router.scores`:

    - ``expert_weight``, "softmax" and "sigmoid": ``ds[t, e] = scale * g[t, k]`` for the chosen expert
      ``e = expert_index[t, k]``, zero for others. With ``renormalize``, first
      ``g = (g - sum over k of g * w) / S``, where S is the sum of the chosen scores, and w = s / S;
    - ``probs_sum``: ``ds = g`` for each token; with "sigmoid" ``ds = (g - sum over e of g * p) / S``, where S is the
      sum of all scores, and p = s / S;
    - then ``dlogits = s * (ds - sum over e of s * ds)`` for softmax, ``dlogits = s * (1 - s) * ds`` for sigmoid;
    - ``expert_weight``, "topk_softmax": the softmax's derivative over the chosen logits;
    - ``z_sum``: ``dlogits = 2 * g * logsumexp(logits) * softmax(logits)``; ``router_logits``: ``dlogits = g``.
    """

    needs = (
        "grad_expert_weight", "grad_router_logits", "grad_probs_sum", "grad_z_sum", "router_logits", "expert_index",
    )  # fmt: skip
    gives = ("grad_logits",)
    launches = 16
    op: Router

    def compute(
        self,
        dweight_TK: Tensor | None,
        dlogits_TE: Tensor | None,
        dprobs_E: Tensor | None,
        dz: Tensor | None,
        logits_TE: Tensor,
        index_TK: Tensor,
    ) -> Tensor:
        terms = [] if dlogits_TE is None else [dlogits_TE]
        if self.op.score == "topk_softmax" and dweight_TK is not None:
            chosen_TK = torch.softmax(logits_TE.gather(1, index_TK), dim=-1)
            terms.append(_scattered(logits_TE, index_TK, _softmax_grad(chosen_TK, dweight_TK * self.op.scale)))
            dweight_TK = None
        if dweight_TK is not None or dprobs_E is not None:
            scores_TE = self.op.scores(logits_TE)
            dscores_TE = self._scores_grad(scores_TE, index_TK, dweight_TK, dprobs_E)
            sigmoid = self.op.score == "sigmoid"
            terms.append(scores_TE * (1 - scores_TE) * dscores_TE if sigmoid else _softmax_grad(scores_TE, dscores_TE))
        if dz is not None:
            lse_T1 = torch.logsumexp(logits_TE, dim=-1, keepdim=True)
            terms.append(2 * dz * lse_T1 * torch.softmax(logits_TE, dim=-1))
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total

    def _scores_grad(
        self, scores_TE: Tensor, index_TK: Tensor, dweight_TK: Tensor | None, dprobs_E: Tensor | None
    ) -> Tensor:
        dscores_TE = None
        if dweight_TK is not None:
            dchosen_TK = dweight_TK * self.op.scale
            if self.op.renormalize:
                dchosen_TK = _normalised_grad(scores_TE.gather(1, index_TK), dchosen_TK)
            dscores_TE = _scattered(scores_TE, index_TK, dchosen_TK)
        if dprobs_E is not None:
            dprobs_TE = dprobs_E.expand_as(scores_TE)
            if self.op.score == "sigmoid":
                dprobs_TE = _normalised_grad(scores_TE, dprobs_TE)
            dscores_TE = dprobs_TE if dscores_TE is None else dscores_TE + dprobs_TE
        assert dscores_TE is not None
        return dscores_TE


def _scattered(like_TE: Tensor, index_TK: Tensor, values_TK: Tensor) -> Tensor:
    return torch.zeros_like(like_TE).scatter(1, index_TK, values_TK)


def _softmax_grad(softmax: Tensor, grad: Tensor) -> Tensor:
    return softmax * (grad - (softmax * grad).sum(-1, keepdim=True))


def _normalised_grad(scores: Tensor, grad: Tensor) -> Tensor:
    total = scores.sum(-1, keepdim=True) + _NOT_ZERO
    return (grad - (grad * scores / total).sum(-1, keepdim=True)) / total


class RouterBiasGrad(BackwardOp):
    """``dbias = sum over the tokens of dlogits``."""

    needs = ("grad_logits", "bias")
    gives = ("grad_bias",)

    def compute(self, dlogits_TE: Tensor, bias: Tensor) -> Tensor:
        return dlogits_TE.sum(0).to(bias.dtype)


class RouterWeightGrad(BackwardOp):
    """``dweight = dlogits.T @ x``, in fp32 (fp64 for fp64 tokens)."""

    needs = ("grad_logits", "input", "weight")
    gives = ("grad_weight",)
    launches = 3

    def compute(self, dlogits_TE: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return (dlogits_TE.T @ x.to(dlogits_TE.dtype)).to(weight.dtype)


class DRouter(BackwardOp):
    """``dx = dy + dlogits @ weight``, in fp32 (fp64 for fp64 tokens): dy is the gradient of the passed rows."""

    needs: tuple[str, ...] = ("grad_output", "grad_logits", "weight")
    launches = 4

    def given(self, gradients: Collection[str]) -> BackwardOp:
        if "grad_output" in gradients:
            return self
        step = DRouter(self.op)
        step.needs = (*self.needs, "input")  # for its dtype
        return step

    def compute(
        self, grad_output: Tensor | None, dlogits_TE: Tensor | None, weight: Tensor, x: Tensor | None = None
    ) -> Tensor:
        if dlogits_TE is None:
            assert grad_output is not None, "otherwise the step is not planned"
            return grad_output
        dx = dlogits_TE @ weight.to(dlogits_TE.dtype)
        if grad_output is None:
            return dx if x is None else dx.to(x.dtype)
        return (grad_output + dx).to(grad_output.dtype)
