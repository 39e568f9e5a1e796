"""The layers whose launches a soak repeats, as data, and the rows per expert that they run with.

Together with `direct`, they run every shipped Hopper kernel. Axes: R rows, T tokens, E experts, K chosen experts per
token, H hidden, I intermediate features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

import fusedmoe as fm
from fusedmoe.commands.verify import calls
from fusedmoe.commands.verify.calls import Call, Maker
from fusedmoe.commands.verify.cases import Case, Layout, Sizes
from fusedmoe.kernels.options import Schedule
from fusedmoe.ops.op import Op

ROWS = 16384
FEW_ROWS = 2048
"""The most that `Route` sorts in one launch of one chunk."""
GROUPS = 8
"""Of the experts of a router with sigmoid scores."""

ACTIVATIONS: dict[str, Callable[[], Op]] = {
    **calls.ACTIVATIONS,
    "interleaved swiglu": lambda: fm.SwiGLU(limit=1.5, alpha=1.702, offset=1.0, interleaved=True),
    "geglu_erf": lambda: fm.GeGLU("none"),
}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer and its arguments.

    The kinds: ``"rows"``, expert MLPs on sorted rows; ``"first"``, without their second product; ``"stored"``, with
    weights that are stored in FP8; ``"tokens"``, the MLPs with `Dispatch` and `Combine`; ``"slots"``, these two alone;
    ``"moe"``, `MoE`; ``"dense"``, an MLP without experts.
    """

    kind: Literal["rows", "first", "stored", "tokens", "slots", "moe", "dense"]
    recipe: str = "bf16"  # a key of `calls.RECIPES`
    tiles: int = 1  # the number of candidate tiles of its products that it runs with, one after the other
    activation: str = "swiglu"
    scaled: bool = False  # a factor per row follows the activation
    combine: str | None = None  # the weights of the sum over slots, as for `Combine`
    bias: bool = False
    main_grad: bool = False  # weight gradients are added to ``main_grad``
    summed: bool = False  # weight gradients are added to ``grad``
    autocast: bool = False  # autocast casts the weights, which are fp32: their gradients are fp32 too
    frozen: str = ""  # the weight without a gradient
    transposed: bool = False  # weights have unit stride along their output features
    grad: bool = True  # with a backward pass
    score: str = "topk_softmax"
    experts: int = 128
    top_k: int = 8
    rows: int = ROWS
    hidden: int = 512
    intermediate: int = 256
    weight_dtype: torch.dtype = torch.float32  # of the routing weights, and of a router's weight
    splits_dtype: torch.dtype = torch.int64

    @property
    def name(self) -> str:
        """The attributes that differ from their defaults, in words."""
        fields = self.__dataclass_fields__
        given = {n: v for n, v in vars(self).items() if v != fields[n].default and n not in ("kind", "recipe", "tiles")}
        words = (n if v is True else f"{n} {v}" for n, v in given.items())
        return ", ".join([self.kind, self.recipe, *words]).replace("torch.", "")

    def make(self, device: torch.device) -> MadeLayer:
        """Return the layer with random weights."""
        return MadeLayer(self, device)


def _layers() -> tuple[Layer, ...]:
    rows, tokens = Layer(kind="rows"), Layer(kind="tokens", scaled=True)
    scaled, no_grad = replace(rows, scaled=True), replace(rows, grad=False)
    transposed = replace(rows, transposed=True)
    with_4_tiles = rows, scaled, replace(rows, main_grad=True), replace(rows, summed=True), replace(rows, autocast=True)
    with_3_tiles = [no_grad, tokens, replace(tokens, main_grad=True), replace(tokens, summed=True)]
    with_3_tiles += [replace(tokens, autocast=True)]
    with_3_tiles += [replace(tokens, grad=False), replace(rows, frozen="2.weight")]
    made = [replace(layer, tiles=4) for layer in with_4_tiles]
    made += [replace(layer, tiles=3) for layer in with_3_tiles]
    made += [replace(transposed, tiles=2, grad=grad) for grad in (True, False)]
    made += [replace(rows, bias=True, splits_dtype=torch.int32), replace(rows, recipe="fp16", bias=True)]
    others = [activation for activation in ACTIVATIONS if activation != "swiglu"]
    made += [replace(layer, activation=other) for other in others for layer in (rows, scaled, no_grad)]
    made += [replace(transposed, activation="interleaved swiglu", grad=grad) for grad in (True, False)]

    for dtype in (torch.float32, torch.bfloat16):
        slots = Layer(kind="slots", combine="probs", weight_dtype=dtype)
        made += [replace(slots, experts=experts, rows=n) for experts in (64, 128, 256, 512) for n in (ROWS, FEW_ROWS)]
        made += [replace(slots, top_k=top_k) for top_k in (2, 4)]
        made += [Layer(kind="moe", experts=experts, weight_dtype=dtype) for experts in (64, 128)]
    made += [Layer(kind="moe", experts=256, score="sigmoid", weight_dtype=torch.bfloat16)]
    made += [Layer(kind="moe", top_k=top_k, weight_dtype=torch.bfloat16) for top_k in (2, 4)]

    for recipe in ("fp8_block", "fp8_tensor"):
        of_rows, of_tokens = replace(rows, recipe=recipe, tiles=3), replace(tokens, recipe=recipe, tiles=3)
        made += [of_rows, replace(of_rows, scaled=True), replace(of_rows, main_grad=True)]
        made += [replace(of_rows, autocast=True), replace(of_tokens, autocast=True)]
        made += [replace(of_rows, summed=True), of_tokens, replace(no_grad, recipe=recipe)]
        frozen = "" if recipe == "fp8_tensor" else "2.weight"
        in_bf16 = replace(of_rows, recipe=f"{recipe}, wgrad in bf16", tiles=2)
        made += [in_bf16, replace(in_bf16, scaled=True)]
        made += [replace(in_bf16, frozen=frozen), replace(in_bf16, scaled=True, frozen=frozen.replace("2", "3"))]
    made += [Layer(kind="first", recipe="fp8_block", grad=grad) for grad in (True, False)]
    delayed = replace(rows, recipe="fp8_tensor, delayed")
    made += [delayed, replace(delayed, grad=False), replace(tokens, recipe=delayed.recipe)]
    hybrid = replace(rows, recipe="fp8_block, hybrid", tiles=2)
    made += [hybrid, replace(hybrid, frozen="weight", tiles=1), replace(tokens, recipe=hybrid.recipe)]
    # the codes of tokens are gathered, except if few rows read each token
    made += [replace(tokens, recipe=hybrid.recipe, top_k=1, frozen="weight")]
    made += [Layer(kind="stored", recipe="fp8_block"), Layer(kind="dense", recipe="fp8_block")]
    made += [replace(rows, recipe="mxfp8"), replace(scaled, recipe="mxfp8")]
    return tuple(dict.fromkeys(made))


LAYERS = _layers()


# ---- rows per expert ------------------------------------------------------------------------------------------------


def _shares(shares: Tensor) -> Callable[[int], Tensor]:
    return lambda rows: (shares.double() / shares.double().sum() * rows).floor().long()


def _mixed(experts: int, generator: torch.Generator) -> Callable[[int], Tensor]:
    few, many = torch.rand(2, experts, generator=generator, dtype=torch.float32, device="cpu")
    of_many = _shares(torch.where(few < 0.5, 0.0, many**4))
    return lambda rows: torch.where(few < 0.5, (6 * few).long(), of_many(rows - 3 * experts))


DISTRIBUTIONS: dict[str, Callable[[int, torch.Generator], Callable[[int], Tensor]]] = {
    "even": lambda experts, _: _shares(torch.ones(experts, dtype=torch.float32, device="cpu")),
    "zipf": lambda experts, _: _shares((1.0 + torch.arange(experts, device="cpu")) ** -1.5),
    "mixed": _mixed,
    "ones": lambda experts, _: lambda rows: torch.ones(experts, dtype=torch.long, device="cpu"),
    "short": lambda experts, generator: lambda rows: torch.randint(8, (experts,), generator=generator, device="cpu"),
    "deep": lambda experts, _: _shares((torch.arange(experts, device="cpu") % 8 == 0).float()),
}
"""Functions of E and a generator. Half of the experts of ``mixed`` have 0 to 2 rows; of ``deep``, each eighth has rows.
"""


def rows_per_expert(distribution: str, experts: int, rows: int) -> list[int]:
    """Return the rows of each expert, at most R in all. The others are rows of no expert."""
    counts = DISTRIBUTIONS[distribution](experts, torch.Generator().manual_seed(1))(rows)
    return [int(count) for count in counts]


# ---- modules and arguments ------------------------------------------------------------------------------------------


class MadeLayer:
    """A layer with its weights."""

    def __init__(self, layer: Layer, device: torch.device) -> None:
        self.layer, self.device = layer, device
        self.dtype = torch.float16 if layer.recipe == "fp16" else torch.bfloat16
        self._generator = torch.Generator(device).manual_seed(0)
        with torch.device(device):
            self.module = self._module()
            self._set_weights()
        self._given: dict[str, Call] = {}
        self._expected: dict[str, dict[str, Tensor]] = {}

    def call(self, distribution: str, schedule: Schedule) -> Call:
        """Return the call with these rows per expert. The module is new, so that its plan is too."""
        if distribution not in self._given:
            self._expected.clear()
            self._given = {distribution: self._make_call(distribution)}
        call, module = self._given[distribution], self.module
        if isinstance(module, fm.MoE):
            module.schedule = schedule
        else:
            module = fm.Sequential(*module.children(), schedule=schedule)
        return replace(call, module=module)

    def results(self, call: Call) -> dict[str, Tensor]:
        """Return the output and the gradients."""
        call.forget_quantized_weights()
        with torch.set_grad_enabled(self.layer.grad):
            return call.results()

    def expected(self, call: Call) -> dict[str, Tensor]:
        """Return the output and the gradients of plain PyTorch, for the rows per expert of the last `call`."""
        distribution = call.case.layout.name
        if distribution not in self._expected:
            with fm.disabled("*"):
                self._expected[distribution] = self.results(call)
        return self._expected[distribution]

    # ---- the module ----

    def _module(self) -> nn.Module:
        layer = self.layer
        hidden, width = layer.hidden, layer.intermediate
        activation = ACTIVATIONS[layer.activation]()
        wide = width if isinstance(activation, fm.SquaredReLU) else 2 * width
        if layer.kind == "moe":
            groups = GROUPS if layer.score == "sigmoid" else 1
            made = fm.MoE(
                hidden, width, layer.experts, layer.top_k, score=layer.score, num_groups=groups,
                top_groups=-(-groups // 2), dtype=self.dtype,
            )  # fmt: skip
            made.router.weight = nn.Parameter(made.router.weight.detach().to(layer.weight_dtype))
            return made
        if layer.kind == "dense":
            first = fm.Linear(hidden, wide, bias=False, dtype=self.dtype)
            return fm.Sequential(first, activation, fm.Linear(width, hidden, bias=False, dtype=self.dtype))
        ends = (fm.Dispatch(layer.experts), fm.Combine(layer.combine))
        if layer.kind == "slots":
            return fm.Sequential(*ends)
        mlp: list[nn.Module] = [self._grouped(hidden, wide), activation]
        if layer.kind != "first":
            mlp += [*([fm.Scale("probs")] if layer.scaled else []), self._grouped(width, hidden)]
        return fm.Sequential(ends[0], *mlp, ends[1]) if layer.kind == "tokens" else fm.Sequential(*mlp)

    def _grouped(self, width: int, features: int) -> fm.GroupedLinear:
        layer = self.layer
        if layer.kind == "stored":
            return self._maker(Case(layer.kind, layer.recipe, Layout("", (0,) * layer.experts))).stored(features, width)
        dtype = torch.float32 if layer.autocast else self.dtype
        made = fm.GroupedLinear(layer.experts, width, features, bias=layer.bias, dtype=dtype)
        if layer.transposed:
            made.weight = nn.Parameter(made.weight.detach().mT.contiguous().mT)
        if layer.main_grad:
            made.accumulate_into_main_grad = True
            made.weight.main_grad = made.weight.new_zeros(made.weight.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        return made

    def _maker(self, case: Case) -> Maker:
        return Maker(case, Sizes(hidden=self.layer.hidden), self.device, self._generator)

    def _set_weights(self) -> None:
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                if name == "router.weight":  # orthonormal: see `_logits`
                    seeded = torch.Generator().manual_seed(0)
                    shape = reversed(parameter.shape)
                    directions = torch.randn(*shape, generator=seeded, dtype=torch.float32, device="cpu")
                    parameter.copy_(torch.linalg.qr(directions).Q.T)
                elif parameter.is_floating_point() and parameter.requires_grad:
                    parameter.normal_(generator=self._generator).div_(parameter.shape[-1] ** 0.5)
                if self.layer.frozen and name.endswith(self.layer.frozen):
                    parameter.requires_grad_(False)

    # ---- the arguments ----

    def _make_call(self, distribution: str) -> Call:
        layer, module = self.layer, self.module
        splits = rows_per_expert(distribution, layer.experts, layer.rows)
        layout = Layout(distribution, tuple(splits), layer.rows - sum(splits))
        case = Case(
            layer.kind, layer.recipe, layout, main_grad=layer.main_grad, summed=layer.summed, autocast=layer.autocast
        )  # fmt: skip
        make = self._maker(case)
        if layer.kind in ("rows", "first", "stored"):
            features = layer.intermediate if layer.kind == "first" else layer.hidden
            return make.of_rows(module, splits_dtype=layer.splits_dtype, features=features)
        if layer.kind in ("tokens", "slots"):
            return make.of_tokens(module, layer.top_k, layer.weight_dtype)
        call = make.alone(module, layer.top_k)
        if layer.kind == "moe":
            call.x.data = self._logits(splits, len(call.x)).to(self.dtype)
        return call

    def _logits(self, splits: list[int], tokens: int) -> Tensor:
        """Return tokens (T, H) that choose experts without replacement, in proportion to their rows.

        The logits of chosen experts are far from the others, so that no rounding changes the choice.
        """
        layer, experts = self.layer, len(splits)
        shares = torch.tensor(splits, device=self.device, dtype=torch.float32) + 0.01
        noise = self._uniform(tokens, experts).clamp(1e-6, 1 - 1e-6)
        keys = shares.log() - (-noise.log()).log()  # Gumbel noise: the largest keys are such a draw
        if layer.score == "sigmoid":  # from the experts of half of the groups
            in_group = self._uniform(tokens, GROUPS).argsort(1) < GROUPS // 2
            keys = keys.where(in_group.repeat_interleave(experts // GROUPS, 1), -torch.inf)
        rank = keys.argsort(1, descending=True).argsort(1)
        logits = torch.where(rank < layer.top_k, 4 - rank / 4, 0.0)
        return logits @ self.module.router.weight.detach().float()  # type: ignore[operator, union-attr]

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self._generator, dtype=torch.float32, device=self.device)
