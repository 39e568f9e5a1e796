"""The modules and tensors of the cases.

Rows after the last expert's, and tokens without an expert, are NaN, as are their gradients. Axes: R rows, T tokens,
E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

import fusedmoe as fm
from fusedmoe.commands.verify.cases import Case, Sizes
from fusedmoe.numerics.formats import Delayed, fp8_block
from fusedmoe.numerics.recipes import NVFP4, FP8Block, FP8Tensor

if TYPE_CHECKING:
    from fusedmoe.commands.verify.machine import Results
    from fusedmoe.fusion.report.data import Explanation
    from fusedmoe.numerics.recipes import Recipe
    from fusedmoe.ops.op import Op

TOP_K = 2
DELAYED_STEPS = 2
RECIPES: dict[str, str | Recipe] = {
    "bf16": "bf16",
    "fp16": "bf16",
    "fp8_block": "fp8_block",
    "fp8_block, hybrid": FP8Block(hybrid=True),
    "fp8_block, wgrad in bf16": FP8Block(wgrad="bf16"),
    "fp8_tensor": "fp8_tensor",
    "fp8_tensor, wgrad in bf16": FP8Tensor(wgrad="bf16"),
    "fp8_tensor, delayed": FP8Tensor(delayed=Delayed(4)),
    "mxfp8": "mxfp8",
    "nvfp4": NVFP4(stochastic_rounding=False),
    "nvfp4, stochastic": "nvfp4",
}
ACTIVATIONS: dict[str, Callable[[], Op]] = {
    "swiglu": fm.SwiGLU,
    "clamped swiglu": lambda: fm.SwiGLU(limit=1.5, alpha=1.702, offset=1.0),
    "geglu": fm.GeGLU,
    "reglu": fm.ReGLU,
    "squared relu": fm.SquaredReLU,
}
BEFORE = 1.0
"""The content of ``main_grad`` or ``grad`` before a call, so that a gradient that is not added shows."""


@dataclass(frozen=True)
class Call:
    """A module and the arguments of a call, which can be repeated.

    Attributes
    ----------
    case
        The case.
    module, x, inputs, grad_output
        The module, its rows or tokens (R, H), its named inputs, and the gradient of its output.
    num_experts
        E; 0 without experts.
    ends
        Of rows in the order of experts: the end of each expert's rows. Empty for tokens.
    used
        Whether each row belongs to an expert: bool, (R,).
    """

    case: Case
    module: nn.Module
    x: Tensor
    inputs: dict[str, Tensor]
    grad_output: Tensor
    num_experts: int
    ends: tuple[int, ...]
    used: Tensor = field(repr=False)

    @property
    def has_state(self) -> bool:
        """Whether a call changes the module, so that the next call differs."""
        return "delayed" in self.case.recipe

    @property
    def draws(self) -> bool:
        """Whether a call draws random numbers. Those of `results` are the same in each call."""
        return "stochastic" in self.case.recipe

    @property
    def shares_memory(self) -> bool:
        """Whether calls write to the same memory, so that they cannot run at once."""
        return self.case.main_grad or self.case.summed

    def results(self) -> Results:
        """Run forward and backward; return the output ``y`` and the gradients by name. No gradients under `no_grad`."""
        if self.draws:
            with torch.random.fork_rng([self.x.device] if self.x.is_cuda else []):
                torch.manual_seed(0)
                return self._results(self.module)
        if not self.has_state:
            return self._results(self.module)
        module = deepcopy(self.module)
        self._give_main_grads(module)  # which a copy lacks
        for _ in range(DELAYED_STEPS - 1):
            self._results(module)
        return self._results(module)

    def explain(self) -> Explanation:
        """Return the plans of the call."""
        with fm.recipe(RECIPES[self.case.recipe]):
            explanation: Explanation = self.module.explain(self.x, **self.inputs)  # type: ignore[operator]
            return explanation

    def forget_quantized_weights(self) -> None:
        """Let the next call quantize the weights."""
        fm.clear_weight_cache(self.module)

    def _give_main_grads(self, module: nn.Module) -> None:
        for parameter, copied in zip(self.module.parameters(), module.parameters(), strict=True):
            if hasattr(parameter, "main_grad"):
                copied.main_grad = torch.empty_like(parameter.main_grad)  # type: ignore[attr-defined]

    def _results(self, module: nn.Module) -> Results:
        parameters = dict(module.named_parameters())
        main_grads = {name: p.main_grad for name, p in parameters.items() if hasattr(p, "main_grad")}
        for main_grad in main_grads.values():
            main_grad.fill_(BEFORE)
        tensors: dict[str, Tensor] = {"x": self.x, **self.inputs, **parameters}
        leaves = {name: t for name, t in tensors.items() if t.requires_grad}
        with fm.recipe(RECIPES[self.case.recipe]):
            y = module(self.x, **self.inputs)
            if not y.requires_grad:
                return {"y": y}
            if self.case.summed:
                return {"y": y.detach(), **self._added(y, leaves)}
            grads = torch.autograd.grad(y, tuple(leaves.values()), self.grad_output, allow_unused=True)
        found: dict[str, Tensor | None] = dict(zip(leaves, grads, strict=True))
        found |= {name: main_grad - BEFORE for name, main_grad in main_grads.items()}
        return {"y": y.detach(), **{name: grad for name, grad in found.items() if grad is not None}}

    def _added(self, y: Tensor, leaves: dict[str, Tensor]) -> Results:
        """Return the gradients after a backward pass that adds them to those of weights."""
        for t in leaves.values():
            t.grad = torch.full_like(t, BEFORE) if t.dim() == 3 else None
        y.backward(self.grad_output)
        found = {name: t.grad - BEFORE if t.dim() == 3 else t.grad for name, t in leaves.items() if t.grad is not None}
        for t in leaves.values():
            t.grad = None
        return found


def make_call(case: Case, sizes: Sizes, device: torch.device) -> Call:
    """Return the call of a case. The same case has the same values in every process."""
    return MODULES[case.module](_Maker(case, sizes, device))


class Maker:
    """Random values, and calls with them; the generator's device draws them."""

    def __init__(
        self, case: Case, hidden: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
    ) -> None:
        self.case, self.hidden, self.dtype, self.device = case, hidden, dtype, device
        self.experts = len(case.layout.splits)
        self._generator = generator

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return normal values."""
        drawn = torch.randn(*shape, generator=self._generator, dtype=torch.float32, device=self._generator.device)
        return drawn.to(self.device, dtype or self.dtype)

    def rand(self, *shape: int) -> Tensor:
        """Return values between 0.2 and 1, in fp32."""
        drawn = torch.rand(*shape, generator=self._generator, dtype=torch.float32, device=self._generator.device)
        return (drawn * 0.8 + 0.2).to(self.device)

    def stored(self, features: int, width: int) -> fm.GroupedLinear:
        """Return a grouped layer whose weight is stored in FP8."""
        weight = self.randn(self.experts, features, width, dtype=torch.float32) / width**0.5
        q = fm.quantize(weight, fp8_block(across=128, power_of_two=False))
        return fm.GroupedLinear.from_quantized(q.data, q.scale)

    def ready(self, module: nn.Module) -> nn.Module:
        """Return the module with its weights."""
        return module

    def of_rows(
        self, module: nn.Module, *, splits_dtype: torch.dtype = torch.int64, features: int | None = None
    ) -> Call:
        """Return a call with rows in the order of experts; its results have ``features``, by default H."""
        layout = self.case.layout
        ends = tuple(itertools.accumulate(layout.splits))
        used = torch.arange(layout.rows, device="cpu") < ends[-1]
        inputs = {"splits": torch.tensor(layout.splits, dtype=splits_dtype, device=self.device)}
        if any(isinstance(op, fm.Scale) for op in module.children()):
            inputs["probs"] = self._poisoned(self.rand(layout.rows), used)
        return self._call(self.ready(module), layout.rows, inputs, ends, used, features)

    def of_tokens(self, module: nn.Module, top_k: int, weight_dtype: torch.dtype = torch.float32) -> Call:
        """Return a call with tokens and their experts. The ids of rows without an expert are those of no expert."""
        layout, on = self.case.layout, self._generator.device
        counts = torch.tensor([*layout.splits, layout.tail], device="cpu")
        order = torch.randperm(layout.rows, generator=self._generator, device=on).cpu()
        index = torch.arange(self.experts + 1, device="cpu").repeat_interleave(counts)[order].view(-1, top_k)
        weight = self.rand(*index.shape).to(weight_dtype).requires_grad_()
        inputs = {"expert_index": index.to(self.device), "expert_weight": weight}
        used = (index < self.experts).any(1)
        return self._call(self.ready(module), len(index), inputs, (), used)

    def alone(self, module: nn.Module, top_k: int) -> Call:
        """Return a call with tokens alone."""
        tokens = self.case.layout.rows // top_k
        return self._call(self.ready(module), tokens, {}, (), torch.ones(tokens, dtype=torch.bool, device="cpu"))

    def _call(
        self,
        module: nn.Module,
        rows: int,
        inputs: dict[str, Tensor],
        ends: tuple[int, ...],
        used: Tensor,
        features: int | None = None,
    ) -> Call:
        x = self._poisoned(self.randn(rows, self.hidden), used)
        grad = self._poisoned(self.randn(rows, features or self.hidden), used).detach()
        return Call(self.case, module, x, inputs, grad, self.experts, ends, used.to(self.device))

    def _poisoned(self, values: Tensor, used: Tensor) -> Tensor:
        values[~used.to(values.device)] = torch.nan
        return values.requires_grad_()


class _Maker(Maker):
    """Layers for a case."""

    def __init__(self, case: Case, sizes: Sizes, device: torch.device) -> None:
        dtype = torch.float16 if case.recipe == "fp16" else torch.bfloat16
        generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
        super().__init__(case, sizes.hidden, dtype, device, generator)
        self.sizes = sizes

    def activation(self) -> tuple[Op, int]:
        """Return the activation, and the width of its input over that of its output."""
        activation = ACTIVATIONS[self.case.activation]()
        return activation, 1 if isinstance(activation, fm.SquaredReLU) else 2

    def mlp(self, scale: bool = True) -> list[nn.Module]:
        """Return the ops of an expert MLP."""
        activation, wide = self.activation()
        hidden, intermediate = self.sizes.hidden, self.sizes.intermediate
        return [
            self.grouped(hidden, wide * intermediate),
            activation,
            *([fm.Scale("probs")] if scale else []),
            self.grouped(intermediate, hidden),
        ]

    def grouped(self, width: int, features: int) -> fm.GroupedLinear:
        """Return a grouped layer."""
        biased = self.case.bias or self.case.frozen_bias
        return fm.GroupedLinear(self.experts, width, features, bias=biased, dtype=self.dtype)

    def ready(self, module: nn.Module) -> nn.Module:
        """Move a module to the device, with random parameters, and ``main_grad`` if the case has it."""
        module = module.to(self.device)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.requires_grad:
                    fan_in = parameter.shape[-1] if parameter.dim() > 1 else 16
                    of_bias = parameter.shape[-2] == self.experts if parameter.dim() == 2 else False
                    parameter.copy_(self.randn(*parameter.shape) / (4 if of_bias else fan_in**0.5))
        for layer in module.modules() if self.case.frozen_bias else ():
            if isinstance(layer, fm.GroupedLinear):
                cast("Tensor", layer.bias).requires_grad_(False)
        for layer in module.modules() if self.case.main_grad else ():
            if isinstance(layer, fm.GroupedLinear | fm.Linear):
                layer.accumulate_into_main_grad = True
                layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)  # type: ignore[attr-defined]
        return module


def _experts(make: _Maker) -> Call:
    return make.of_rows(fm.Sequential(*make.mlp()))


def _routed(make: _Maker) -> Call:
    return make.of_tokens(fm.Sequential(fm.Dispatch(), *make.mlp(), fm.Combine(None)), TOP_K)


def _weighted_at_the_end(make: _Maker) -> Call:
    return make.of_tokens(fm.Sequential(fm.Dispatch(), *make.mlp(scale=False), fm.Combine("probs")), TOP_K)


def _routed_layer(make: _Maker) -> Call:
    layer = make.grouped(make.sizes.hidden, make.sizes.hidden)
    return make.of_tokens(fm.Sequential(fm.Dispatch(), layer, fm.Combine(None)), TOP_K)


def _moe(make: _Maker) -> Call:
    sizes, options = make.sizes, {"router_bias": make.case.bias, "dtype": make.dtype}
    layer = fm.MoE(sizes.hidden, sizes.intermediate, 8, TOP_K, shared_intermediate=sizes.shared, **options)  # type: ignore[arg-type]
    return make.alone(layer, TOP_K)


def _dense(make: _Maker) -> Call:
    activation, wide = make.activation()
    hidden, width = make.sizes.hidden, make.sizes.shared
    first = fm.Linear(hidden, wide * width, bias=make.case.bias, dtype=make.dtype)
    last = fm.Linear(width, hidden, bias=make.case.bias, dtype=make.dtype)
    return make.alone(fm.Sequential(first, activation, last), TOP_K)


def _stored_weights(make: _Maker) -> Call:
    hidden, intermediate = make.sizes.hidden, make.sizes.intermediate
    layers = make.stored(2 * intermediate, hidden), fm.SwiGLU(), make.stored(hidden, intermediate)
    return make.of_rows(fm.Sequential(*layers))


MODULES: dict[str, Callable[[_Maker], Call]] = {
    "experts": _experts,
    "routed": _routed,
    "weighted_at_the_end": _weighted_at_the_end,
    "routed_layer": _routed_layer,
    "moe": _moe,
    "dense": _dense,
    "stored_weights": _stored_weights,
}
