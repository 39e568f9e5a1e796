"""A dense SwiGLU MLP: ``fm.Sequential(Linear, SwiGLU, Linear)`` and the same layers under `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedmoe as fm
from benchmarks.parts import Variant, compare, lines
from fusedmoe.commands.bench.layer import OURS
from fusedmoe.commands.timing import Timer

ONE_LINEAR, TWO_LINEARS = "torch.compile, gate and up as one linear", "torch.compile, gate and up as two linears"

Exact = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class DenseSizes:
    tokens: int = 16384
    hidden: int = 4096
    intermediate: int = 14336


def measure(timer: Timer, device: torch.device, sizes: DenseSizes = DenseSizes()) -> dict[str, Any]:
    """Measure and print; return the entry of the result file."""
    seeded = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, fan_in: int = 1) -> Tensor:
        drawn = torch.randn(shape, generator=seeded, device=device, dtype=torch.bfloat16)
        return drawn.mul_(fan_in**-0.5)

    t, h, i = sizes.tokens, sizes.hidden, sizes.intermediate
    x, dy = draw(t, h), draw(t, h)
    gate_up, down = draw(2 * i, h, fan_in=h), draw(h, i, fan_in=i)

    def exact() -> tuple[Tensor, ...]:
        leaves = [t.double().requires_grad_() for t in (x, gate_up, down)]
        y = mlp(*leaves)
        return (y.detach(), *torch.autograd.grad(y, leaves, dy.double()))

    def exact_of_two() -> tuple[Tensor, ...]:
        y, grad_x, grad_gate_up, grad_down = exact()
        return (y, grad_x, *grad_gate_up.chunk(2), grad_down)

    def ours() -> Variant:
        chain = fm.Sequential(
            fm.Linear(h, 2 * i, bias=False, device="meta", dtype=x.dtype),
            fm.SwiGLU(),
            fm.Linear(i, h, bias=False, device="meta", dtype=x.dtype),
        )
        chain.load_state_dict({"0.weight": gate_up, "2.weight": down}, assign=True)
        leaf, first, second = x.detach().requires_grad_(), *chain.parameters()
        return Variant(lambda: chain(leaf), {"x": leaf, "gate_up": first, "down": second}, dy, exact)

    def compiled(function: Callable[..., Tensor], exact: Exact, **operands: Tensor) -> Variant:
        leaves = {name: t.detach().requires_grad_() for name, t in operands.items()}
        run = torch.compile(function, dynamic=False)
        return Variant(lambda: run(*leaves.values()), leaves, dy, exact)

    gate, up = gate_up.chunk(2)
    makers = {
        OURS: ours,
        ONE_LINEAR: lambda: compiled(mlp, exact, x=x, gate_up=gate_up, down=down),
        TWO_LINEARS: lambda: compiled(mlp_of_two, exact_of_two, x=x, gate=gate, up=up, down=down),
    }
    torch.compiler.reset()
    rows = compare(makers, timer, device)
    print(f"\ndense SwiGLU MLP: {t} tokens, hidden {h}, intermediate {i}")
    print("\n".join(lines(rows)), flush=True)
    return asdict(sizes) | {"rows": [asdict(row) for row in rows]}


def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def mlp_of_two(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
