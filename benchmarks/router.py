"""The router: the weights of the K chosen experts, forward and backward, with gradients of the tokens and its weight.

It is measured as a module, and as a part of the layer: the time of the layer minus that of its experts for given
routing. The latter includes that the two gradients of the tokens are added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedmoe as fm
from benchmarks.parts import PartRow, Variant, compare, lines
from fusedmoe.commands.bench.layer import OURS, Sizes, Work, our_layer, route
from fusedmoe.commands.bench.measure import STEP
from fusedmoe.commands.timing import Timer

SIZES = Sizes(hidden=2048, intermediate=128, experts=128, top_k=8, tokens=32768)
TORCH, IN_LAYER = "torch", f"{OURS}, in the layer, by difference"


def measure(timer: Timer, device: torch.device, sizes: Sizes = SIZES) -> dict[str, Any]:
    """Measure and print; return the entry of the result file."""
    work = Work(sizes, torch.bfloat16, device)
    grad_weight = torch.randn(sizes.tokens, sizes.top_k, device=device)
    rows = compare(
        {OURS: lambda: _ours(work, grad_weight), TORCH: lambda: _torch(work, grad_weight)},
        timer,
        device,
    )
    rows.append(_in_layer(work, timer))
    print(f"\nrouter: {sizes.tokens} tokens, hidden {sizes.hidden}, {sizes.experts} experts, top {sizes.top_k}")
    print("\n".join(lines(rows)), flush=True)
    asked = ("tokens", "hidden", "intermediate", "experts", "top_k")
    return {name: getattr(sizes, name) for name in asked} | {"rows": [asdict(row) for row in rows]}


def _ours(work: Work, grad_weight: Tensor) -> Variant:
    s = work.sizes
    router = fm.Router(s.hidden, s.experts, s.top_k, score="topk_softmax", device="meta", dtype=work.dtype)
    router.load_state_dict({"weight": work.router}, assign=True)
    return _variant(work, router.weight, grad_weight, lambda x: router(x)[:2])


def _torch(work: Work, grad_weight: Tensor) -> Variant:
    weight = work.router.detach().requires_grad_()
    return _variant(work, weight, grad_weight, lambda x: route(x, weight, work.sizes.top_k))


def _variant(
    work: Work, weight: Tensor, grad_weight: Tensor, routed: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> Variant:
    x = work.x.detach().requires_grad_()

    def exact() -> tuple[Tensor, ...]:
        index, _ = routed(x)
        leaves = [t.double().requires_grad_() for t in (work.x, work.router)]
        expert_weight = torch.softmax(F.linear(*leaves).gather(1, index), dim=-1)
        return (expert_weight.detach(), *torch.autograd.grad(expert_weight, leaves, grad_weight.double()))

    return Variant(lambda: routed(x)[1], {"x": x, "router": weight}, grad_weight, exact)


def _in_layer(work: Work, timer: Timer) -> PartRow:
    layer, x = our_layer(work), work.x.detach().requires_grad_()
    index, weight = route(work.x, work.router, work.sizes.top_k)
    weight.requires_grad_()
    experts = tuple(layer.experts.parameters())
    times = timer.measure(
        {
            "layer": lambda: torch.autograd.grad(layer(x), (x, layer.router.weight, *experts), work.dy),
            "experts": lambda: torch.autograd.grad(
                layer.experts(x, expert_index=index, expert_weight=weight), (x, weight, *experts), work.dy
            ),
        }
    )
    whole, part = times["layer"], times["experts"]
    note = f"{whole.median_ms:.3f} ms - {part.median_ms:.3f} ms"
    host_us = whole.host_idle_us - part.host_idle_us
    return PartRow(STEP, IN_LAYER, note, whole.median_ms - part.median_ms, host_us)
