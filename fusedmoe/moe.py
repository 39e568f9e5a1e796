"""`MoE`: a drop-in layer of a router and its experts.

Axes: T tokens, E experts, K chosen experts per token, H hidden, I intermediate.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _get_tracing_state

from fusedmoe.autocast import without_autocast
from fusedmoe.checks import (
    FINITE,
    FLAG,
    FLOATS,
    MODULE,
    NOT_NEGATIVE,
    POSITIVE_INTEGER,
    TENSOR,
    Checked,
    check_all,
    check_factory,
    instance,
    one_of,
    said,
)
from fusedmoe.errors import NO_EXPERT_PARALLELISM, InputError, inside_jit_trace
from fusedmoe.kernels.torch.rows import rows_per_expert
from fusedmoe.ops.dispatch import Combine, Dispatch
from fusedmoe.ops.glu import GLU, GeGLU, ReGLU, SwiGLU
from fusedmoe.ops.grouped_linear import GroupedLinear, Linear
from fusedmoe.ops.op import Op
from fusedmoe.ops.scale import Scale
from fusedmoe.ops.squared_relu import SquaredReLU
from fusedmoe.sequential import Sequential, kernel_options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fusedmoe.checks import Check
    from fusedmoe.fusion.plan import Explanation
    from fusedmoe.kernels.options import Schedule

ACTIVATIONS: dict[str, type[Op]] = {"swiglu": SwiGLU, "geglu": GeGLU, "reglu": ReGLU, "squared_relu": SquaredReLU}
"""The activations that `MoE` accepts by name."""

SCORES = ("softmax", "topk_softmax", "sigmoid")

_CHOICE = {"num_experts", "top_k", "num_groups", "top_groups"}  # settings that `Router._check_choice` checks together
_MOE: Mapping[str, Check] = {
    "intermediate": POSITIVE_INTEGER,
    "bias": FLAG,
    "router_bias": FLAG,
    "shared_gate": FLAG,
    "balance_bias": FLAG.or_none(),
    "shared_intermediate": POSITIVE_INTEGER.or_none(),
}


class Routing(NamedTuple):
    """The result of a `Router`, on the device. Floats are fp32 (fp64 for fp64 tokens).

    Attributes
    ----------
    expert_index : Tensor
        (T, K) int64: the chosen experts.
    expert_weight : Tensor
        (T, K): the weights of the chosen experts.
    logits : Tensor
        (T, E).
    probs : Tensor
        (T, E), with rows that sum to 1: the softmax of the logits, or the normalised sigmoid scores.
    """

    expert_index: Tensor
    expert_weight: Tensor
    logits: Tensor
    probs: Tensor


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


class Router(Checked, nn.Module):
    """Chooses K of E experts per token. Logits, scores and weights are fp32 (fp64 for fp64 tokens), also in autocast.

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

    def forward(self, x: Tensor) -> Routing:
        """Route tokens ``x`` (T, H)."""
        if not isinstance(x, Tensor):
            raise InputError(f"Router: x: expected a tensor, got {type(x).__name__}")
        if x.dim() != 2 or x.shape[1] != self.hidden:
            raise InputError(f"Router: x: expected shape (tokens, {self.hidden}), got {tuple(x.shape)}")
        FLOATS("Router: x", x.dtype)
        exact = torch.promote_types(x.dtype, torch.float32)
        with without_autocast(x.device):
            bias = None if self.bias is None else self.bias.to(exact)
            logits_TE = F.linear(x.to(exact), self.weight.to(exact), bias)
            scores_TE = torch.sigmoid(logits_TE) if self.score == "sigmoid" else torch.softmax(logits_TE, dim=-1)
            ranked_TE = logits_TE if self.score == "topk_softmax" else scores_TE
            index_TK = self._choose(ranked_TE.detach())
            if self.score == "topk_softmax":
                weight_TK = torch.softmax(logits_TE.gather(1, index_TK), dim=-1)
            else:
                weight_TK = scores_TE.gather(1, index_TK)
                if self.renormalize:
                    weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)
            if self.score == "sigmoid":
                scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
            return Routing(index_TK, weight_TK * self.scale, logits_TE, scores_TE)

    if TYPE_CHECKING:
        __call__ = forward

    def _choose(self, ranked_TE: Tensor) -> Tensor:
        bias = self.balance_bias
        if bias is not None:
            ranked_TE = ranked_TE + (bias if bias.dtype is torch.float32 else bias.to(ranked_TE.dtype))
        if self.top_groups < self.num_groups:
            grouped_TGE = ranked_TE.unflatten(1, (self.num_groups, -1))
            best = min(2 if self.score == "sigmoid" else 1, grouped_TGE.shape[-1])
            group_TG = grouped_TGE.topk(best, dim=-1).values.sum(-1)
            chosen = group_TG.topk(self.top_groups, dim=-1).indices
            left_out_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(1, chosen, False)
            ranked_TE = grouped_TGE.masked_fill(left_out_TG.unsqueeze(-1), -torch.inf).flatten(1)
        return ranked_TE.topk(self.top_k, dim=-1).indices

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
        load_E = rows_per_expert(routing.expert_index, self.num_experts)
        slots = max(routing.expert_index.numel(), 1)
        balance = self.num_experts * (load_E / slots * routing.probs.sum(0) / max(len(routing.probs), 1)).sum()
        z_loss = torch.logsumexp(routing.logits, dim=-1).square().sum() / max(len(routing.logits), 1)
        return MoEStats(balance, z_loss, load_E, routing.logits)

    def extra_repr(self) -> str:
        """Return the settings, as `torch.nn.Module` prints them."""
        return f"hidden={self.hidden}, num_experts={self.num_experts}, top_k={self.top_k}, score={self.score!r}"


class MoE(Checked, nn.Module):
    """A Mixture-of-Experts MLP: ``y[t] = sum over k of w[t, k] * expert[e[t, k]](x[t]) + shared(x[t])``.

    Parameters
    ----------
    hidden, intermediate, num_experts, top_k
        H, I, E and K.
    activation
        ``"swiglu"``, ``"geglu"``, ``"reglu"``, ``"squared_relu"``, or an op: ``SwiGLU(limit=7.0, alpha=1.702,
        offset=1.0)``.
    bias
        Whether the experts' linear layers have biases.
    shared_intermediate
        Intermediate size of a shared expert, which gets every token; None for no shared expert.
    shared_gate
        Multiply the shared expert's output by ``sigmoid(x @ gate.T)``, one gate per token (Qwen2-MoE).
    score, renormalize, scale, router_bias, balance_bias, num_groups, top_groups
        As for `Router`; ``router_bias`` is its ``bias``.
    device, dtype
        Device and dtype of the parameters.
    sm_margin, schedule
        As for `Sequential`; they apply to the experts and the shared expert. They can also be set as attributes.
    expert_parallel
        Not supported yet: any value except None raises. All weights of the layer are on one rank.

    Attributes
    ----------
    router : Router
    experts : Sequential
        ``dispatch``, ``gate_up`` (E, 2I, H), ``activation``, ``scale``, ``down`` (E, H, I), ``combine``. For an
        activation without a gate, ``gate_up`` is (E, I, H). With biases ``combine`` applies the routing weights, and
        there is no ``scale``.
    shared : Sequential or None
        ``gate_up``, ``activation``, ``down``.
    """

    _checks: ClassVar[Mapping[str, Check]] = {
        "hidden": POSITIVE_INTEGER,
        "router": MODULE,
        "experts": MODULE,
        "shared": MODULE.or_none(),
        "shared_gate": MODULE.or_none(),
    }

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        activation: str | Op = "swiglu",
        bias: bool = False,
        shared_intermediate: int | None = None,
        shared_gate: bool = False,
        score: str = "softmax",
        renormalize: bool = True,
        scale: float = 1.0,
        router_bias: bool = False,
        balance_bias: bool | None = None,
        num_groups: int = 1,
        top_groups: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        sm_margin: int = 0,
        schedule: Schedule = "static",
        expert_parallel: object = None,
    ) -> None:
        super().__init__()
        if expert_parallel is not None:
            raise InputError(f"MoE: expert_parallel: expected None, got {expert_parallel!r}; {NO_EXPERT_PARALLELISM}")
        self.hidden = hidden
        check_all("MoE", _MOE, intermediate=intermediate, bias=bias, router_bias=router_bias, shared_gate=shared_gate)
        check_all("MoE", _MOE, balance_bias=balance_bias, shared_intermediate=shared_intermediate)
        self.router = Router(
            hidden,
            num_experts,
            top_k,
            score=score,
            renormalize=renormalize,
            scale=scale,
            bias=router_bias,
            balance_bias=balance_bias,
            num_groups=num_groups,
            top_groups=top_groups,
            device=device,
            dtype=dtype,
        )
        wide = 2 if isinstance(_activation(activation), GLU) else 1
        # `scale` applies the routing weight in the epilogue of the activation, so that its gradient needs no saved
        # output of the experts. A bias of `down` would be added after that, so `combine` must apply the weight instead.
        ops: dict[str, Op | None] = {
            "dispatch": Dispatch(num_experts),
            "gate_up": GroupedLinear(num_experts, hidden, wide * intermediate, bias=bias, device=device, dtype=dtype),
            "activation": _activation(activation),
            "scale": None if bias else Scale("probs"),
            "down": GroupedLinear(num_experts, intermediate, hidden, bias=bias, device=device, dtype=dtype),
            "combine": Combine("probs" if bias else None),
        }
        self.experts = Sequential(OrderedDict((name, op) for name, op in ops.items() if op is not None))
        self.shared: Sequential | None = None
        self.shared_gate: Linear | None = None
        if shared_intermediate is not None:
            self.shared = Sequential(
                OrderedDict(
                    gate_up=Linear(hidden, wide * shared_intermediate, bias=False, device=device, dtype=dtype),
                    activation=_activation(activation),
                    down=Linear(shared_intermediate, hidden, bias=False, device=device, dtype=dtype),
                )
            )
        if shared_gate:
            if self.shared is None:
                raise InputError("MoE: shared_gate: expected with shared_intermediate, which is None")
            # like the router, the gate is never quantized
            self.shared_gate = Linear(hidden, 1, bias=False, device=device, dtype=dtype, recipe="bf16")
        self._set_options(sm_margin, schedule)

    @property
    def sm_margin(self) -> int:
        """Number of SMs that the fused kernels leave free."""
        return self.experts.sm_margin

    @sm_margin.setter
    def sm_margin(self, sm_margin: int) -> None:
        self._set_options(sm_margin, self.schedule)

    @property
    def schedule(self) -> Schedule:
        """Tile scheduling of the fused kernels: ``"static"`` or ``"dynamic"``."""
        return self.experts.schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self._set_options(self.sm_margin, schedule)

    def _set_options(self, sm_margin: int, schedule: Schedule) -> None:
        options = kernel_options("MoE", sm_margin, schedule)
        for chain in (self.experts, self.shared):
            if chain is not None:
                chain.sm_margin, chain.schedule = options.sm_margin, options.schedule

    @overload
    def forward(self, x: Tensor, return_stats: Literal[False] = False) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, return_stats: Literal[True]) -> tuple[Tensor, MoEStats]: ...

    @overload
    def forward(self, x: Tensor, return_stats: bool) -> Tensor | tuple[Tensor, MoEStats]: ...

    def forward(self, x: Tensor, return_stats: bool = False) -> Tensor | tuple[Tensor, MoEStats]:
        """Run the layer on ``x`` (..., H).

        Returns
        -------
        Tensor or (Tensor, MoEStats)
            y, of the shape and dtype of x; with ``return_stats`` also the losses and the load.
        """
        if type(return_stats) is not bool:
            return_stats = FLAG("MoE: return_stats", return_stats)  # type: ignore[unreachable]
        self.check_biases()
        tokens, routing = self._route(x)
        y = self.experts(tokens, expert_index=routing.expert_index, expert_weight=routing.expert_weight)
        if self.shared is not None:
            shared = self.shared(tokens)
            if self.shared_gate is not None:
                shared = torch.sigmoid(self.shared_gate(tokens)) * shared
            y = y + shared
        if x.dim() != 2:  # with a needless view, FSDP2 warns about in-place ops on it
            y = y.view(*x.shape[:-1], y.shape[-1])
        return (y, self.router.stats(routing)) if return_stats else y

    if TYPE_CHECKING:  # a call of nn.Module returns Any to a type checker
        __call__ = forward

    def check_biases(self) -> None:
        """Raise if ``experts.down`` was given a bias: the routing weight, applied before, would not scale it."""
        down = getattr(self.experts, "down", None)
        if isinstance(getattr(down, "bias", None), Tensor) and hasattr(self.experts, "scale"):
            raise InputError(
                "MoE: experts.down: expected no bias, since the routing weight is applied before it and would not "
                "scale it, got a bias: construct the layer with bias=True"
            )

    def explain(self, x: Tensor, arch: int | str | None = None) -> Explanation:
        """Return the plan of the experts' chain for this input; ``print`` it for a table. The router runs.

        ``arch`` is as for `Sequential.explain`: 90 plans for an sm_90 GPU.
        """
        self.check_biases()
        tokens, routing = self._route(x)
        return self.experts.explain(
            tokens, arch=arch, expert_index=routing.expert_index, expert_weight=routing.expert_weight
        )

    def _route(self, x: Tensor) -> tuple[Tensor, Routing]:
        if not torch.compiler.is_compiling() and _get_tracing_state() is not None:
            raise inside_jit_trace("MoE")
        if not isinstance(x, Tensor):
            raise InputError(f"MoE: x: expected a tensor, got {type(x).__name__}")
        if not x.dim() or x.shape[-1] != self.hidden:
            raise InputError(f"MoE: x: expected shape (..., {self.hidden}), got {tuple(x.shape)}")
        tokens = x.reshape(-1, self.hidden)
        return tokens, self.router(tokens)


def _activation(activation: object) -> Op:
    """Return a new op for a name; a given op is returned itself, and the experts and the shared expert share it."""
    if isinstance(activation, Op):
        return activation
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        expected = f"an op or one of {', '.join(map(repr, ACTIVATIONS))}"
        raise InputError(f"MoE: activation: expected {expected}, got {said(activation)}")
    return ACTIVATIONS[activation]()
