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
    """A module and the arguments of a call, which can be repeated."""

    case: Case
    module: nn.Module
    x: Tensor  # rows or tokens, (R, H)
    inputs: dict[str, Tensor]
    grad_output: Tensor
    num_experts: int  # 0 without experts
    ends: tuple[int, ...]  # of rows in the order of experts: the end of each expert's rows; empty for tokens
    used: Tensor = field(repr=False)  # whether each row belongs to an expert: bool, (R,)

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
        for parameter, copied in zip(self.module.parameters(), module.parameters(), strict=True):
            if hasattr(parameter, "main_grad"):  # which a copy lacks
                copied.main_grad = torch.empty_like(parameter.main_grad)  # type: ignore[attr-defined]
        for _ in range(DELAYED_STEPS - 1):
            self._results(module)
        return self._results(module)

    def explain(self) -> Explanation:
        """Return the plans of the call."""
        autocast = torch.autocast(self.x.device.type, self.x.dtype, enabled=self.case.autocast)
        with fm.recipe(RECIPES[self.case.recipe]), autocast:
            explanation: Explanation = self.module.explain(self.x, **self.inputs)  # type: ignore[operator]
            return explanation

    def forget_quantized_weights(self) -> None:
        """Let the next call quantize the weights."""
        fm.clear_weight_cache(self.module)

    def _results(self, module: nn.Module) -> Results:
        parameters = dict(module.named_parameters())
        main_grads = {name: p.main_grad for name, p in parameters.items() if hasattr(p, "main_grad")}
        for main_grad in main_grads.values():
            main_grad.fill_(BEFORE)
        tensors: dict[str, Tensor] = {"x": self.x, **self.inputs, **parameters}
        leaves = {name: t for name, t in tensors.items() if t.requires_grad}
        with fm.recipe(RECIPES[self.case.recipe]):
            with torch.autocast(self.x.device.type, self.x.dtype, enabled=self.case.autocast):
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
    make = Maker(case, sizes, device)
    module = make.ready(MODULES[case.module](make))
    if case.module in ("experts", "stored_weights"):
        return make.of_rows(module)
    return make.alone(module, TOP_K) if case.module in ("moe", "dense") else make.of_tokens(module, TOP_K)


class Maker:
    """Random values, layers and calls of a case. The generator's device draws the values, by default the CPU."""

    def __init__(
        self, case: Case, sizes: Sizes, device: torch.device, generator: torch.Generator | None = None
    ) -> None:
        self.case, self.sizes, self.device = case, sizes, device
        self.dtype = torch.float16 if case.recipe == "fp16" else torch.bfloat16
        self.experts = len(case.layout.splits)
        self._generator = generator or torch.Generator().manual_seed(zlib.crc32(case.name.encode()))

    def randn(self, *shape: int) -> Tensor:
        """Return normal values, in fp32."""
        on = self._generator.device
        return torch.randn(*shape, generator=self._generator, dtype=torch.float32, device=on).to(self.device)

    def rand(self, *shape: int) -> Tensor:
        """Return values between 0.2 and 1, in fp32."""
        on = self._generator.device
        drawn = torch.rand(*shape, generator=self._generator, dtype=torch.float32, device=on)
        return (drawn * 0.8 + 0.2).to(self.device)

    # ---- layers ----

    def mlp(self, scale: bool = True) -> list[nn.Module]:
        """Return the ops of an expert MLP."""
        activation, wide = self._activation()
        hidden, intermediate = self.sizes.hidden, self.sizes.intermediate
        factor = [fm.Scale("probs")] if scale else []
        return [self.grouped(hidden, wide * intermediate), activation, *factor, self.grouped(intermediate, hidden)]

    def grouped(self, width: int, features: int) -> fm.GroupedLinear:
        """Return a grouped layer."""
        biased = self.case.bias or self.case.frozen_bias
        return fm.GroupedLinear(self.experts, width, features, bias=biased, dtype=self.dtype)

    def _moe(self) -> nn.Module:
        sizes, bias = self.sizes, self.case.bias
        return fm.MoE(
            sizes.hidden, sizes.intermediate, 8, TOP_K,
            shared_intermediate=sizes.shared, router_bias=bias, dtype=self.dtype,
        )  # fmt: skip

    def _dense(self) -> nn.Module:
        activation, wide = self._activation()
        hidden, width, bias = self.sizes.hidden, self.sizes.shared, self.case.bias
        first = fm.Linear(hidden, wide * width, bias=bias, dtype=self.dtype)
        return fm.Sequential(first, activation, fm.Linear(width, hidden, bias=bias, dtype=self.dtype))

    def _stored_weights(self) -> nn.Module:
        hidden, intermediate = self.sizes.hidden, self.sizes.intermediate
        return fm.Sequential(self.stored(2 * intermediate, hidden), fm.SwiGLU(), self.stored(hidden, intermediate))

    def stored(self, features: int, width: int) -> fm.GroupedLinear:
        """Return a grouped layer whose weight is stored in FP8."""
        weight = self.randn(self.experts, features, width) / width**0.5
        q = fm.quantize(weight, fp8_block(across=128, power_of_two=False))
        return fm.GroupedLinear.from_quantized(q.data, q.scale)

    def ready(self, module: nn.Module) -> nn.Module:
        """Move a module to the device, with random parameters, and ``main_grad`` if the case has it."""
        module = module.to(self.device, torch.float32 if self.case.autocast else None)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.requires_grad:
                    fan_in = parameter.shape[-1] if parameter.dim() > 1 else 16
                    of_bias = parameter.shape[-2] == self.experts if parameter.dim() == 2 else False
                    parameter.copy_(self.randn(*parameter.shape) / (4 if of_bias else fan_in**0.5))
        for layer in module.modules():
            if self.case.frozen_bias and isinstance(layer, fm.GroupedLinear):
                cast("Tensor", layer.bias).requires_grad_(False)
            if self.case.main_grad and isinstance(layer, fm.GroupedLinear | fm.Linear):
                layer.accumulate_into_main_grad = True
                layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)  # type: ignore[attr-defined]
        return module

    def _activation(self) -> tuple[Op, int]:
        """Return the activation, and the width of its input over that of its output."""
        activation = ACTIVATIONS[self.case.activation]()
        return activation, 1 if isinstance(activation, fm.SquaredReLU) else 2

    # ---- calls ----

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
        return self._call(module, inputs, used, ends, features)

    def of_tokens(self, module: nn.Module, top_k: int, weight_dtype: torch.dtype = torch.float32) -> Call:
        """Return a call with tokens and their experts. The ids of rows without an expert are those of no expert."""
        layout, on = self.case.layout, self._generator.device
        counts = torch.tensor([*layout.splits, layout.tail], device="cpu")
        order = torch.randperm(layout.rows, generator=self._generator, device=on).cpu()
        index = torch.arange(self.experts + 1, device="cpu").repeat_interleave(counts)[order].view(-1, top_k)
        weight = self.rand(*index.shape).to(weight_dtype).requires_grad_()
        inputs = {"expert_index": index.to(self.device), "expert_weight": weight}
        return self._call(module, inputs, (index < self.experts).any(1))

    def alone(self, module: nn.Module, top_k: int) -> Call:
        """Return a call with tokens alone."""
        return self._call(module, {}, torch.ones(self.case.layout.rows // top_k, dtype=torch.bool, device="cpu"))

    def _call(
        self,
        module: nn.Module,
        inputs: dict[str, Tensor],
        used: Tensor,
        ends: tuple[int, ...] = (),
        features: int | None = None,
    ) -> Call:
        x, grad = (
            self._poisoned(self.randn(len(used), width).to(self.dtype), used)
            for width in (self.sizes.hidden, features or self.sizes.hidden)
        )
        return Call(self.case, module, x, inputs, grad.detach(), self.experts, ends, used.to(self.device))

    def _poisoned(self, values: Tensor, used: Tensor) -> Tensor:
        values[~used.to(values.device)] = torch.nan
        return values.requires_grad_()


MODULES: dict[str, Callable[[Maker], nn.Module]] = {
    "experts": lambda make: fm.Sequential(*make.mlp()),
    "routed": lambda make: fm.Sequential(fm.Dispatch(), *make.mlp(), fm.Combine(None)),
    "weighted_at_the_end": lambda make: fm.Sequential(fm.Dispatch(), *make.mlp(scale=False), fm.Combine("probs")),
    "routed_layer": lambda make: fm.Sequential(fm.Dispatch(), make.grouped(*[make.sizes.hidden] * 2), fm.Combine(None)),
    "moe": Maker._moe,
    "dense": Maker._dense,
    "stored_weights": Maker._stored_weights,
}
