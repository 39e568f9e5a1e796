"""One MoE layer, router included, in each implementation: ours and plain torch. `benchmarks` adds other libraries.

All implementations get the same tokens, weights and output gradient. They route in the same way: the K largest logits,
and the softmax of these.

Axes: T tokens, E experts, K chosen experts per token, R = T K rows, H hidden, I intermediate.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmoe.call import settings
from fusedmoe.layers.moe import MoE
from fusedmoe.numerics.recipes import BF16, Recipe, shortest
from fusedmoe.ops.glu import ACTIVATIONS, GLU
from fusedmoe.ops.state.weight_cache import clear_weight_cache

OURS = "fusedmoe"
SAMPLED_TOKENS = 32


@dataclass(frozen=True)
class Sizes:
    """The sizes of a layer and a call; ``activation`` is one of `ACTIVATIONS`."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    tokens: int
    activation: str = "swiglu"

    @property
    def wide(self) -> int:
        """Output features of the first product: 2 I for a gated activation, else I."""
        return self.intermediate * (2 if issubclass(ACTIVATIONS[self.activation], GLU) else 1)

    @property
    def forward_flops(self) -> float:
        """FLOPs of the experts' two products; a backward pass has twice as many."""
        return 2.0 * self.tokens * self.top_k * self.hidden * (self.wide + self.intermediate)


class Leaves(NamedTuple):
    """The tensors that get gradients: tokens (T, H), the router's weight (E, H), and the two weights of the experts."""

    x: Tensor
    router: Tensor
    weight1: Tensor
    weight2: Tensor


class Candidate(NamedTuple):
    """An implementation of the layer."""

    forward: Callable[[], Tensor]  # returns y (T, H), recorded by autograd
    leaves: Leaves  # the tensors that ``forward`` uses
    chosen: Callable[[], Tensor]  # returns the experts that its router chooses, (T, K) in any order
    inference: Callable[[], Tensor] | None = None  # replaces ``forward`` where autograd does not record
    # converts an expert's gradient of ``weight1`` to the layout of the work
    restored: Callable[[Tensor], Tensor] = lambda t: t
    note: str = ""  # a remark for the comparison with the others


class Work:
    """The operands of a layer: normal random rows of variance 1, and weights that preserve the variance.

    ``x`` and ``dy`` are (T, H), ``router`` is (E, H), ``weight1`` (E, 2 I, H) as ``[gate; up]`` or (E, I, H) without a
    gate, and ``weight2`` (E, H, I). ``index`` (T, K) are the experts with the largest logits in fp64.
    """

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: torch.device, recipe: Recipe = BF16) -> None:
        self.sizes, self.dtype, self.device, self.recipe = sizes, dtype, device, recipe
        seeded = torch.Generator(device).manual_seed(0)

        def draw(*shape: int, fan_in: int = 1) -> Tensor:
            drawn = torch.randn(shape, generator=seeded, device=device, dtype=dtype)
            return drawn.mul_(fan_in**-0.5)

        s = sizes
        self.x, self.dy = draw(s.tokens, s.hidden), draw(s.tokens, s.hidden)
        self.router = draw(s.experts, s.hidden, fan_in=s.hidden)
        self.weight1 = draw(s.experts, s.wide, s.hidden, fan_in=s.hidden)
        self.weight2 = draw(s.experts, s.hidden, s.intermediate, fan_in=s.intermediate)
        self.index = (self.x.double() @ self.router.double().T).topk(s.top_k, dim=-1).indices

    def load(self) -> Tensor:
        """Return the rows per expert, (E,), on the CPU."""
        return rows_per_expert(self.index, self.sizes.experts)

    def leaves(self, weight1: Tensor | None = None) -> Leaves:
        """Return new leaves, which share memory with the operands; ``weight1`` may have another layout."""
        weight1 = self.weight1 if weight1 is None else weight1
        return Leaves(*[t.detach().requires_grad_() for t in (self.x, self.router, weight1, self.weight2)])


def rows_per_expert(index: Tensor, experts: int) -> Tensor:
    """Return the rows per expert of a choice (T, K): (E,), on the CPU."""
    return torch.bincount(index.flatten().cpu(), minlength=experts)


# ---- plain torch ---------------------------------------------------------------------------------------------------


def route(x: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the chosen experts (T, K) and their weights, fp32."""
    logits, index = F.linear(x.float(), router.float()).topk(top_k, dim=-1)
    return index, torch.softmax(logits, dim=-1)


def activate(h: Tensor, activation: str) -> Tensor:
    """Return the activation of ``[gate | up]`` rows, in their dtype."""
    if activation == "squared_relu":
        return F.relu(h).square()
    gate, up = h.chunk(2, dim=-1)
    if activation == "swiglu":
        return F.silu(gate) * up
    return (F.gelu(gate, approximate="tanh") if activation == "geglu" else F.relu(gate)) * up


def grouped_mlp(rows: Tensor, weight1: Tensor, weight2: Tensor, offsets: Tensor, activation: str) -> Tensor:
    """Return the experts' results for rows sorted by expert; ``offsets`` are the ends of the experts' rows."""
    h = F.grouped_mm(rows, weight1.mT, offs=offsets)
    return F.grouped_mm(activate(h, activation), weight2.mT, offs=offsets)


def sorted_layer(
    x: Tensor, router: Tensor, weight1: Tensor, weight2: Tensor, top_k: int, mlp: Callable[..., Tensor]
) -> Tensor:
    """Sort the rows by expert, run ``mlp(rows, weight1, weight2, offsets)``, and sum the results per token."""
    index, weight = route(x, router, top_k)
    expert = index.flatten()
    order = expert.argsort(stable=True)
    counts = torch.zeros(len(router), dtype=torch.int32, device=x.device)
    offsets = counts.scatter_add_(0, expert, torch.ones_like(expert, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
    rows = mlp(x.index_select(0, order // top_k), weight1, weight2, offsets)
    rows = rows * weight.flatten().index_select(0, order)[:, None].to(rows.dtype)
    row_of_slot = torch.empty_like(order)
    row_of_slot[order] = torch.arange(len(order), device=x.device)
    return rows.index_select(0, row_of_slot).view(-1, top_k, rows.shape[1]).sum(1)


def looped_layer(x: Tensor, router: Tensor, weight1: Tensor, weight2: Tensor, top_k: int, activation: str) -> Tensor:
    """Loop over the experts; the host reads the rows per expert."""
    index, weight = route(x, router, top_k)
    y = torch.zeros_like(x)
    for expert in range(len(router)):
        token, slot = torch.where(index == expert)
        rows = F.linear(activate(F.linear(x[token], weight1[expert]), activation), weight2[expert])
        y.index_add_(0, token, rows * weight[token, slot, None].to(rows.dtype))
    return y


# ---- candidates ----------------------------------------------------------------------------------------------------


def our_layer(work: Work) -> MoE:
    """Return the layer of this package, with the weights of the work."""
    s = work.sizes
    layer = MoE(
        s.hidden, s.intermediate, s.experts, s.top_k, s.activation,
        score="topk_softmax", device="meta", dtype=work.dtype,
    )  # fmt: skip
    weights = {"router": work.router, "experts.gate_up": work.weight1, "experts.down": work.weight2}
    layer.load_state_dict({f"{name}.weight": weight for name, weight in weights.items()}, assign=True)
    return layer


def ours(work: Work) -> Candidate:
    """Return the layer of this package; under a recipe, each call quantizes the weights, like each training step."""
    layer, x = our_layer(work), work.x.detach().requires_grad_()

    def forward() -> Tensor:
        if work.recipe == BF16:
            return layer(x)
        clear_weight_cache(layer)
        with settings.recipe(work.recipe):
            return layer(x)

    def chosen() -> Tensor:
        with torch.no_grad():
            _, stats = layer(x, return_stats=True)
        return stats.logits.topk(work.sizes.top_k, dim=-1).indices

    note = "" if work.recipe == BF16 else f"recipe {shortest(work.recipe)}"
    return Candidate(forward, Leaves(x, *layer.parameters()), chosen, note=note)


def _routed_by_torch(work: Work, leaves: Leaves) -> Callable[[], Tensor]:
    """Return `Candidate.chosen` of a layer that calls `route`."""
    return lambda: route(leaves.x.detach(), leaves.router.detach(), work.sizes.top_k)[0]


def torch_loop(work: Work) -> Candidate:
    """Return a loop over the experts."""
    leaves = work.leaves()
    call = functools.partial(looped_layer, *leaves, work.sizes.top_k, work.sizes.activation)
    note = "reads the rows per expert on the host" if work.device.type == "cuda" else ""
    return Candidate(call, leaves, _routed_by_torch(work, leaves), note=note)


def torch_grouped(work: Work, layer: Callable[..., Tensor] = sorted_layer) -> Candidate:
    """Return torch's grouped GEMM on sorted rows."""
    leaves, mlp = work.leaves(), functools.partial(grouped_mlp, activation=work.sizes.activation)
    return Candidate(functools.partial(layer, *leaves, work.sizes.top_k, mlp), leaves, _routed_by_torch(work, leaves))


def torch_compiled(work: Work) -> Candidate:
    """Return `torch_grouped`, compiled for this number of tokens."""
    torch.compiler.reset()
    return torch_grouped(work, torch.compile(sorted_layer, dynamic=False, fullgraph=True))


class Peer(NamedTuple):
    """A participant in the comparison."""

    name: str
    prepare: Callable[[Work], Candidate]
    devices: tuple[str, ...] = ("cpu", "cuda")


OURS_PEER = Peer(OURS, ours)
COMPILED = Peer("torch grouped_mm, compiled", torch_compiled, devices=("cuda",))
PEERS = (OURS_PEER, Peer("torch grouped_mm", torch_grouped), COMPILED, Peer("torch loop", torch_loop))


# ---- reference -----------------------------------------------------------------------------------------------------


class Reference:
    """The layer in fp64 for a given choice of experts: a sample of tokens, and the weights of one expert.

    ``index`` (T, K) is the choice. The weights of the chosen experts are the softmax of their logits in fp64.
    """

    def __init__(self, work: Work, index: Tensor) -> None:
        s = work.sizes
        count = min(SAMPLED_TOKENS, s.tokens)
        tokens = torch.linspace(0, s.tokens - 1, count, dtype=torch.float32, device=work.device)
        self.tokens = tokens.long().unique()
        self.expert = int(rows_per_expert(index, s.experts).argsort(stable=True)[s.experts // 2])
        x = work.x[self.tokens].double().requires_grad_()
        y = _exact(work, x, work.router.double(), index[self.tokens])
        (grad_x,) = torch.autograd.grad(y, x, work.dy[self.tokens].double())
        self.expected = {"y": y.detach(), "x": grad_x}
        token, _ = torch.where(index == self.expert)
        if len(token):
            # only these tokens contribute to the gradients of the expert's weights and of its row of the router
            router, *weights = (
                w.double().requires_grad_() for w in (work.router, work.weight1[self.expert], work.weight2[self.expert])
            )
            y = _exact(work, work.x[token].double(), router, index[token], {self.expert: weights})
            grads = torch.autograd.grad(y, (router, *weights), work.dy[token].double())
            self.expected |= dict(zip(("router", "weight1", "weight2"), grads, strict=True))
            self.expected["router"] = self.expected["router"][self.expert]

    def errors(self, candidate: Candidate, y: Tensor, grads: Leaves | None = None) -> dict[str, float]:
        """Return the relative errors, in norm, of y and the gradients, by name; infinite if they are not finite."""
        got = {"y": y[self.tokens]}
        if grads is not None:
            got |= {
                "x": grads.x[self.tokens],
                "router": grads.router[self.expert],
                "weight1": candidate.restored(grads.weight1[self.expert]),
                "weight2": grads.weight2[self.expert],
            }
        return {name: relative_error(t, self.expected[name]) for name, t in got.items() if name in self.expected}


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return ``|got - expected| / |expected|``, in norm; infinite if it is not finite."""
    error = ((got.double() - expected).norm() / expected.norm()).item()
    return error if math.isfinite(error) else math.inf


def _exact(
    work: Work, x: Tensor, router: Tensor, index: Tensor, given: Mapping[int, Sequence[Tensor]] | None = None
) -> Tensor:
    """Return y in fp64 for tokens and their choice; ``given`` replaces the two weights of an expert."""
    weight, y = torch.softmax((x @ router.T).gather(1, index), dim=-1), torch.zeros_like(x)
    for expert in index.unique().tolist():
        token, slot = torch.where(index == expert)
        w1, w2 = (given or {}).get(expert) or (work.weight1[expert].double(), work.weight2[expert].double())
        rows = F.linear(activate(F.linear(x[token], w1), work.sizes.activation), w2)
        y = y.index_add(0, token, rows * weight[token, slot, None])
    return y
