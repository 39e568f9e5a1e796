"""Rules for `Router` and its backward ops, alone or with the neighbouring steps of `Dispatch`.

Plain PyTorch computes a router with fp32 products, which do not use tensor cores, and with about thirty launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.requirements import OnSm90, decline
from fusedmoe.builtin_rules.rows.dispatch import bind_sum, sum_us
from fusedmoe.fusion.language.rule import FusionRule, NothingToDo, PlanContext, Run, Step, require
from fusedmoe.kernels.rows.move import slot_functions
from fusedmoe.kernels.sm90 import limits
from fusedmoe.kernels.sm90 import router as router_functions
from fusedmoe.kernels.sm90.router import Choice, LogitsGrads, Routed
from fusedmoe.ops.dispatch import DDispatch, Dispatch, DispatchWeightGrad
from fusedmoe.ops.router import DRouter, Router, RouterBiasGrad, RouterLogitsGrad, RouterWeightGrad

_OPERANDS = ("input", "router.weight", "router.bias", "router.balance_bias")


def _check(ctx: PlanContext, router: Router, x: str, weight: str, bias: torch.dtype | None) -> None:
    experts = router.num_experts
    groups = router.num_groups if router.top_groups < router.num_groups else 1  # if all are chosen, the kernel has none
    decline(limits.why_not_router(ctx.dtype(x), ctx.dtype(weight), bias, experts, router.top_k, groups))
    decline(limits.why_not_width("hidden", router.hidden))


def _choice(router: Router, corrected: bool) -> Choice:
    return Choice(
        router.score,
        router.top_k,
        router.renormalize,
        float(router.scale),
        router.num_groups,
        router.top_groups,
        corrected,
    )


def _guard(x: Tensor, weight: Tensor, *vectors: Tensor | None) -> None:
    if not x.shape[0]:
        raise NothingToDo("no tokens")
    guards.matrix("x", x)
    guards.matrix("the router's weight", weight)
    guards.contiguous("a bias of the router", *vectors)


class _Forward:
    """The router's part of a forward step."""

    router: Router

    def check(self, ctx: PlanContext) -> None:
        bias = ctx.dtype("router.bias") if ctx.exists("router.bias") else None
        _check(ctx, self.router, "input", "router.weight", bias)
        if ctx.exists("router.balance_bias"):
            dtype = ctx.dtype("router.balance_bias")
            require(dtype is torch.float32, "the balance bias is %s, not float32: call update_bias", dtype)

    def gives(self, ctx: PlanContext) -> tuple[str, ...]:
        names = (*self.router.provides, *self.router.provides_if_read)
        return tuple(name for name in (f"router.{n}" for n in names) if ctx.exists(name))

    def launches(self, ctx: PlanContext) -> int:
        """A product, the choice; an fp32 weight in parts; the sums."""
        return 2 + (ctx.dtype("router.weight") is torch.float32) + ctx.exists("router.probs_sum")

    def bind_router(
        self, ctx: PlanContext, x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None
    ) -> Run:
        """Return the function of these tensors that returns what `Routed` has."""
        _guard(x, weight, bias, correction)
        choice, sums = _choice(self.router, correction is not None), ctx.exists("router.probs_sum")
        return router_functions.bind_router(x, weight, bias, choice, sums, ctx.options)


def _provided(routed: Routed) -> tuple[Tensor, ...]:
    """Return the values that the router provides."""
    index, weight, logits, _, sums = routed
    return (index, weight, logits) if sums is None else (index, weight, logits, sums[:-1], sums[-1])


class RouterRule(OnSm90, _Forward, FusionRule, name="sm90.router", direction="forward"):
    """Logits with the accuracy of fp32 on tensor cores, then the choice, in two launches.

    An fp32 weight and the sums that losses need take one more launch each.
    """

    router: Router

    def offer(self, ctx: PlanContext) -> Step:
        self.check(ctx)
        return Step(needs=_OPERANDS, gives=self.gives(ctx), launches=self.launches(ctx))

    def bind(self, ctx: PlanContext, x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None) -> Run:
        route = self.bind_router(ctx, x, weight, bias, correction)
        return lambda *tensors: _provided(route(*tensors))


class RouterDispatchRule(OnSm90, _Forward, FusionRule, name="sm90.router_dispatch", direction="forward"):
    """The router, and the sort of its choices in one more launch: the router has counted each expert's rows. The sort
    also writes the offsets of the experts' rows.

    ``rows[r] = x[token of r]`` is one more launch, if a step reads these rows in order.
    """

    router: Router
    dispatch: Dispatch

    def offer(self, ctx: PlanContext) -> Step:
        self.check(ctx)
        require(
            self.dispatch.num_experts == self.router.num_experts, "Dispatch has %s experts, Router %s",
            self.dispatch.num_experts, self.router.num_experts,
        )  # fmt: skip
        placed = tuple(f"dispatch.{name}" for name in (*self.dispatch.provides, "offsets"))
        return Step(
            needs=_OPERANDS, gives=(*self.gives(ctx), *placed), keeps=("output",), zeroes_tail=True,
            launches=self.launches(ctx) + 1,
        )  # fmt: skip

    def bind(self, ctx: PlanContext, x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None) -> Run:
        route = self.bind_router(ctx, x, weight, bias, correction)
        shape, device = (x.shape[0], self.router.top_k), x.device
        index = torch.empty(shape, dtype=torch.int64, device=device)  # these two only show shape and dtype
        weights = torch.empty(shape, dtype=torch.float32, device=device)
        rows = self.dispatch.rows(index)
        place = router_functions.bind_route_counted(index, weights, self.router.num_experts, rows)
        gather = slot_functions.bind_gather_rows(x, index, None, rows) if ctx.keep else None

        def run(x: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
            routed = route(x, *others)
            placed = place(routed.expert_index, routed.expert_weight, routed.counts)
            if gather is None:
                return *_provided(routed), *placed
            _, _, row_of_slot, slot_of_row, *_ = placed
            return *_provided(routed), *placed, gather(x, row_of_slot, slot_of_row)

        return run


class RouterBackwardRule(OnSm90, FusionRule, name="sm90.router_backward", direction="backward"):
    """The gradients of the logits, of the router's parameters and of the tokens.

    - The gradient of the logits in one launch. It reads the weights' gradient by rows, if `DispatchWeightGrad` comes
      first.
    - The bias's gradient in one more launch.
    - The weight's gradient in two more, by groups of tokens and then their sum.
    - The gradient of the tokens in one more, and its sum with the gradient of the rows that the router passes on in a
      second. With `DDispatch`, the second launch also sums each token's rows.
    """

    from_rows: DispatchWeightGrad | None
    ddispatch: DDispatch | None
    dlogits: RouterLogitsGrad
    dbias: RouterBiasGrad | None
    dweight: RouterWeightGrad | None
    dx: DRouter | None

    def offer(self, ctx: PlanContext) -> Step:
        router = self.dlogits.op
        require(
            self.from_rows is None or ctx.same("from_rows.grad_expert_weight", "dlogits.grad_expert_weight"),
            "another op than Dispatch reads expert_weight",
        )
        _check(ctx, router, "dlogits.input", "dlogits.weight", None)
        x = ctx.dtype("dlogits.input")
        require(x is torch.bfloat16, "x is %s: small gradients of logits need the range of bfloat16", x)
        if self.ddispatch is not None:
            decline(limits.why_not_dtypes({"x": x, "the gradient": ctx.dtype("grad_output")}))
        gives = [
            *(["dbias.grad_bias"] if self.dbias is not None else []),
            *(["dweight.grad_weight"] if self.dweight is not None else []),
        ]
        if self.dx is not None:
            gives.append("dx.grad_input")
        elif self.ddispatch is not None:
            gives.append("ddispatch.grad_input")
        optional = (self.dbias, self.dweight, self.dweight, self.dx)
        # the sum reads the gradient of the tokens, if the router gives one, and replaces it
        added = ["ddispatch.grad_input"] * (1 if self.dx is None else 2)
        adds = self.ddispatch is not None or (self.dx is not None and ctx.exists("dx.grad_output"))
        return Step(
            needs=self._needs(),
            gives=tuple(gives),
            keeps=("dlogits.grad_logits",),
            zeroes_tail=True,
            launches=1 + sum(op is not None for op in optional) + adds,
            light_us=0.0
            if self.ddispatch is None
            else sum_us(ctx, "ddispatch.row_of_slot", "ddispatch.grad_output", *added),
        )

    def _needs(self) -> tuple[str, ...]:
        of_rows = self.from_rows is not None
        sorted_by = "ddispatch" if self.ddispatch is not None else "from_rows"
        return (
            "from_rows.grad_probs" if of_rows else "dlogits.grad_expert_weight",
            f"{sorted_by}.row_of_slot",
            "dlogits.grad_router_logits", "dlogits.grad_probs_sum", "dlogits.grad_z_sum",
            "dlogits.router_logits", "dlogits.expert_index",
            "dweight.input", "dx.weight",
            "dx.grad_output" if self.ddispatch is None else "ddispatch.grad_output",
        )  # fmt: skip

    def bind(
        self, ctx: PlanContext, dweight_TK: Tensor | None, row_of_slot: Tensor | None, dlogits_TE: Tensor | None,
        dprobs_E: Tensor | None, dz: Tensor | None, logits_TE: Tensor, index_TK: Tensor, x: Tensor | None,
        weight: Tensor | None, dy: Tensor | None,
    ) -> Run:  # fmt: skip
        router = self.dlogits.op
        choice = _choice(router, ctx.exists("dlogits.balance_bias"))
        experts, dtype, options = router.num_experts, ctx.dtype("dlogits.weight"), ctx.options
        of_rows, keep = self.from_rows is not None, bool(ctx.keep)
        bias_dtype = None if self.dbias is None else ctx.dtype("dbias.bias")
        tokens = logits_TE.shape[0]
        if not tokens:
            raise NothingToDo("no tokens")
        rows = row_of_slot if of_rows else None
        guards.contiguous("a value of the router", logits_TE, index_TK, row_of_slot)
        products = x is not None or weight is not None
        blocks = router_functions.blocks_for(dtype) if products else ()
        groups = 1
        if x is not None:
            groups = router_functions.weight_groups(tokens, experts, router.hidden, dtype)
        grads = LogitsGrads(dweight_TK, rows, dlogits_TE, dprobs_E, dz)
        of_logits = router_functions.bind_logits_grad(
            logits_TE, grads, choice, blocks, groups, bias_dtype is not None, keep, weight
        )
        like = logits_TE.new_empty(tokens, len(blocks) * router_functions.padded(experts), dtype=torch.bfloat16)
        wgrad = dgrad = total = None
        if x is not None:
            guards.matrix("x", x)
            wgrad = router_functions.bind_router_wgrad(like, x, experts, groups, dtype, options)
        if weight is not None:
            guards.matrix("the router's weight", weight)
            dgrad = router_functions.bind_router_dgrad(like, weight, options)
        if self.ddispatch is not None:
            assert dy is not None
            assert row_of_slot is not None
            guards.gradient(dy)
            addend = None if weight is None else like.new_empty(tokens, router.hidden)
            total = bind_sum(dy, row_of_slot, addend, ctx.beside_sms)

        def run(
            dweight_TK: Tensor | None, row_of_slot: Tensor | None, dlogits_TE: Tensor | None,
            dprobs_E: Tensor | None, dz: Tensor | None, logits_TE: Tensor, index_TK: Tensor, x: Tensor | None,
            weight: Tensor | None, dy: Tensor | None,
        ) -> tuple[Tensor | None, ...]:  # fmt: skip
            of_weight, of_probs, of_z = (None if g is None else g.contiguous() for g in (dweight_TK, dprobs_E, dz))
            direct = None if dlogits_TE is None else _aligned(dlogits_TE)
            grads = LogitsGrads(of_weight, row_of_slot if of_rows else None, direct, of_probs, of_z)
            parts, ends, sums, whole, split = of_logits(logits_TE, index_TK, grads, weight)
            results: list[Tensor | None] = []
            if bias_dtype is not None:
                assert sums is not None
                results.append(sums.to(bias_dtype))
            if wgrad is not None:
                assert x is not None
                results.append(wgrad(parts, ends, x))
            dx = None
            if dgrad is not None:
                assert split is not None
                dx = dgrad(parts, ends, split)
            if total is not None:
                assert dy is not None
                dx = total(dy, row_of_slot, None, dx)
            elif dx is not None and dy is not None:
                dx = dy + dx
            if dx is not None:
                results.append(dx)
            if keep:
                results.append(whole)
            return tuple(results)

        return run


def _aligned(t: Tensor) -> Tensor:
    """Return a gradient of logits, contiguous and at an address that kernels can read. Autograd may pass a view into a
    larger gradient, such as that of the logits of several layers.
    """
    aligned = t.stride() == (t.shape[1], 1) and limits.why_not_address("", t.data_ptr()) is None
    return t if aligned else t.clone(memory_format=torch.contiguous_format)
