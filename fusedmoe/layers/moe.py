"""`MoE`: a drop-in layer of a router and its experts.

Axes: T tokens, E experts, K chosen experts per token, H hidden, I intermediate.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeGuard, overload

import torch
from torch import Tensor
from torch._C import _get_tracing_state

from fusedmoe.base.checks import FLAG, MODULE, POSITIVE_INTEGER, Check, Checked, check_all, said
from fusedmoe.base.errors import InputError, inside_jit_trace
from fusedmoe.base.inputs import check_dense
from fusedmoe.call import modes
from fusedmoe.call.partition import partition_for
from fusedmoe.expert_parallel import ExpertParallel
from fusedmoe.fusion.report.data import Explanation
from fusedmoe.kernels.options import KernelOptions, Schedule
from fusedmoe.layers.sequential import Sequential, explain_call, kernel_options
from fusedmoe.numerics.expert_rows import rows_per_expert
from fusedmoe.ops.dispatch import Combine, Dispatch
from fusedmoe.ops.glu import ACTIVATIONS, GLU
from fusedmoe.ops.grouped_linear import GroupedLinear, Linear
from fusedmoe.ops.op import Op, Runnable
from fusedmoe.ops.router import MoEStats as MoEStats
from fusedmoe.ops.router import Router, stats_of
from fusedmoe.ops.router import Routing as Routing
from fusedmoe.ops.scale import Scale

_MOE: Mapping[str, Check] = {
    "intermediate": POSITIVE_INTEGER,
    "bias": FLAG,
    "router_bias": FLAG,
    "shared_gate": FLAG,
    "balance_bias": FLAG.or_none(),
    "shared_intermediate": POSITIVE_INTEGER.or_none(),
}

_READ_BY_STATS = ("expert_index", "router_logits", "probs_sum", "z_sum", "splits")


class MoE(Checked, Runnable):
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
        As for `Sequential`; they apply to the router, the experts and the shared expert. They can also be set as
        attributes. With ``expert_parallel``, the shared expert leaves free at least the SMs of the exchange beside it.
    expert_parallel
        The ranks that share the experts, an `ExpertParallel`; None for all experts on this rank. ``num_experts`` counts
        the experts of all ranks. The experts' weights are those of this rank, (E / P, out, in). The router and the
        shared expert are the same on every rank. x and y are the tokens of this rank, any number of them.

    Attributes
    ----------
    router : Router
        Any other module that returns a `Routing`, and has its ``stats``, may be set in its place. Its plan is then not
        part of the layer's.
    experts : Sequential
        ``dispatch``, ``gate_up`` (E, 2I, H), ``activation``, ``scale``, ``down`` (E, H, I), ``combine``. For an
        activation without a gate, ``gate_up`` is (E, I, H). With biases ``combine`` applies the routing weights, and
        there is no ``scale``. In fp16 the plan applies them in ``combine`` too, since ``scale`` would underflow.
    shared : Sequential or None
        ``gate_up``, ``activation``, ``down``.
    """

    _chained_names = ("router", "experts")
    _sms_of_exchange = 0  # that the shared expert runs beside

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
        schedule: Schedule = "dynamic",
        expert_parallel: ExpertParallel | None = None,
    ) -> None:
        super().__init__()
        here = num_experts
        if expert_parallel is not None:
            if not isinstance(expert_parallel, ExpertParallel):
                raise InputError(
                    f"MoE: expert_parallel: expected an ExpertParallel or None, got {said(expert_parallel)}"
                )
            here = expert_parallel.local_experts(POSITIVE_INTEGER("MoE: num_experts", num_experts), "MoE")
            expert_parallel = expert_parallel.chosen_for(POSITIVE_INTEGER("MoE: top_k", top_k))
            if expert_parallel.can_run_beside:
                self._sms_of_exchange = expert_parallel.engine.sms
        self.expert_parallel = expert_parallel
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
        linear: Any = {"bias": bias, "device": device, "dtype": dtype, "expert_parallel": expert_parallel}
        ops: dict[str, Op | None] = {
            "dispatch": Dispatch(num_experts, expert_parallel=expert_parallel),
            "gate_up": GroupedLinear(here, hidden, wide * intermediate, **linear),
            "activation": _activation(activation),
            "scale": None if bias else Scale("probs"),
            "down": GroupedLinear(here, intermediate, hidden, **linear),
            "combine": Combine("probs" if bias else None, expert_parallel=expert_parallel),
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
        """Tile scheduling of the fused kernels: ``"dynamic"`` or ``"static"``."""
        return self.experts.schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self._set_options(self.sm_margin, schedule)

    def _set_options(self, sm_margin: int, schedule: Schedule) -> None:
        options = kernel_options("MoE", sm_margin, schedule)
        for chain, least in ((self.experts, 0), (self.shared, self._sms_of_exchange)):
            if chain is not None:
                chain.sm_margin, chain.schedule = max(options.sm_margin, least), options.schedule

    @overload
    def forward(self, x: Tensor, return_stats: Literal[False] = False) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, return_stats: Literal[True]) -> tuple[Tensor, MoEStats]: ...

    @overload
    def forward(self, x: Tensor, return_stats: bool) -> Tensor | tuple[Tensor, MoEStats]: ...

    def forward(self, x: Tensor, return_stats: bool = False) -> Tensor | tuple[Tensor, MoEStats]:
        """Run the layer on ``x`` (..., H).

        Returns y, of the shape and dtype of x; with ``return_stats`` also the losses and the load.
        """
        if type(return_stats) is not bool:
            return_stats = FLAG("MoE: return_stats", return_stats)  # type: ignore[unreachable]
        self.check_biases()
        tokens = self._tokens(x)
        if self._runs_shared_beside():
            y, stats = modes.run_untraced(self._routed_beside_shared, tokens, return_stats)
        else:
            y, stats = self._routed(tokens, return_stats)
            if self.shared is not None:
                y = y + self._shared(tokens)
        if x.dim() != 2:  # with a needless view, FSDP2 warns about in-place ops on it
            y = y.view(*x.shape[:-1], y.shape[-1])
        return y if stats is None else (y, stats)

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
        """Return the plan of router and experts for this input; ``print`` it for a table.

        ``arch`` is as for `Sequential.explain`: 90 plans for an sm_90 GPU. Another module in the router's place runs
        once, since the plan of the experts depends on the shapes and dtypes that it returns; it is not in the plan.
        """
        self.check_biases()
        tokens = self._tokens(x)
        if self._is_one_chain():
            return explain_call(self, None, tokens, {}, arch)
        routing = self._routing(tokens)
        return self.experts.explain(
            tokens, arch=arch, expert_index=routing.expert_index, expert_weight=routing.expert_weight
        )

    def _routed(self, tokens: Tensor, return_stats: bool) -> tuple[Tensor, MoEStats | None]:
        """Return the result of the routed experts, and the stats of the routing if they are wanted."""
        if not self._is_one_chain():
            routing = self._routing(tokens)
            y = self.experts(tokens, expert_index=routing.expert_index, expert_weight=routing.expert_weight)
            return y, self.router.stats(routing) if return_stats else None
        if not return_stats:
            return modes.run(self, tokens, {}), None
        y, values = modes.run(self, tokens, {}, None, _READ_BY_STATS)
        index, logits = values["expert_index"], values["router_logits"]
        # a `Sequential` that is called as a module, because of its hooks, does not return them
        load = values.get("splits") if self.expert_parallel is None else None  # splits of the tokens of all ranks
        if load is None:
            load = rows_per_expert(index, logits.shape[1])
        return y, stats_of(load, index.numel(), logits, values["probs_sum"], values["z_sum"])

    def _shared(self, tokens: Tensor) -> Tensor:
        """Return the result of the shared expert, with its gate."""
        assert self.shared is not None
        shared = self.shared(tokens)
        return shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(tokens)) * shared

    def _runs_shared_beside(self) -> bool:
        """Whether the shared expert runs while tokens travel, inside the call of the routed experts: not if a wrapper,
        such as one that recomputes them or sets a recipe, would apply to it too.
        """
        ep, experts = self.expert_parallel, self._modules["experts"]
        if self.shared is None or ep is None or not ep.can_run_beside:
            return False
        return self._opens(experts) and "forward" not in experts.__dict__

    def _routed_beside_shared(self, tokens: Tensor, return_stats: bool) -> tuple[Tensor, MoEStats | None]:
        """Return the result of `_routed` plus that of the shared expert, which runs while the tokens travel."""
        assert self.expert_parallel is not None
        shared: list[Tensor] = []
        with self.expert_parallel.beside(lambda: shared.append(self._shared(tokens)), tokens.device):
            y, stats = self._routed(tokens, return_stats)
        return y + shared[0], stats

    def _routing(self, tokens: Tensor) -> Routing:
        """Return the result of the router, called as a module; raise if it is no `Routing`."""
        routing: Any = self.router(tokens)
        if not (hasattr(routing, "expert_index") and hasattr(routing, "expert_weight")):
            kind, got = type(self.router).__name__, type(routing).__name__
            raise InputError(f"MoE: router: expected a module that returns a Routing, got {kind}, which returns {got}")
        return routing  # type: ignore[no-any-return]

    @staticmethod
    def _opens(module: object) -> TypeGuard[Sequential]:
        return Sequential._opens(module)

    def _is_one_chain(self) -> bool:
        """Whether router and experts are planned together: not if another module took the place of one of them."""
        modules = self._modules
        return isinstance(modules["router"], Router) and isinstance(modules["experts"], Sequential)

    def _is_called(self, name: str) -> None:
        """Set the name in a model, for the log lines of new plans."""
        if self._is_one_chain():
            self._of_process.place = name
            partition_for(self).name(name)
        else:
            self.experts._is_called(f"{name}.experts".lstrip("."))

    @property
    def _options(self) -> KernelOptions:  # type: ignore[override]
        return self.experts._options

    def _tokens(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and _get_tracing_state() is not None:
            raise inside_jit_trace("MoE")
        if not isinstance(x, Tensor):
            raise InputError(f"MoE: x: expected a tensor, got {type(x).__name__}")
        if x.is_nested or x.layout is not torch.strided:
            check_dense("MoE: x", x)
        if not x.dim() or x.shape[-1] != self.hidden:
            raise InputError(f"MoE: x: expected shape (..., {self.hidden}), got {tuple(x.shape)}")
        return x.reshape(-1, self.hidden)


def _activation(activation: object) -> Op:
    """Return a new op for a name; a given op is returned itself, and the experts and the shared expert share it."""
    if isinstance(activation, Op):
        return activation
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        expected = f"an op or one of {', '.join(map(repr, ACTIVATIONS))}"
        raise InputError(f"MoE: activation: expected {expected}, got {said(activation)}")
    return ACTIVATIONS[activation]()
