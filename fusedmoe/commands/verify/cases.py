"""The cases of a verification, and the bounds of its errors, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The number of rows of each expert, and of the rows after the last expert's."""

    name: str
    splits: tuple[int, ...]
    tail: int = 0

    @property
    def rows(self) -> int:
        """All rows, those after the last expert's included."""
        return sum(self.splits) + self.tail


UNEVEN = Layout("uneven splits", (129, 70, 256, 33))
LAYOUTS = (
    UNEVEN,
    Layout("an empty expert", (140, 0, 61, 0), 23),
    Layout("one-token experts", (1, 200, 1, 60), 2),
    Layout("skewed", (3, 500, 0, 9)),
    Layout("all rows at one expert", (0, 0, 300, 0), 20),
    Layout("one expert with padding", (300,), 212),
    Layout("rows after the last expert", (100, 28, 0, 130), 254),
)


@dataclass(frozen=True)
class Sizes:
    """The widths of the layers: 128 times an odd number, so that no tile of 256 features fits."""

    hidden: int = 384
    intermediate: int = 640  # of an expert
    shared: int = 128  # of dense layers


@dataclass(frozen=True)
class Bounds:
    """Bounds of relative errors, in the Frobenius norm of each expert's part of a result. Zeros have an error of 1."""

    unfused: float  # against plain PyTorch, which also rounds the values between ops
    rounding: float | None = None  # against the same arithmetic with the kernels' rounding points, where it exists


BOUNDS = {
    "bf16": Bounds(0.015),
    "fp16": Bounds(0.002),
    "fp8_block": Bounds(0.06),
    "fp8_tensor": Bounds(0.1),
    "fp8_tensor, delayed": Bounds(0.1),
    "mxfp8": Bounds(0.08, 0.01),
    "nvfp4": Bounds(0.15, 0.01),
    "nvfp4, stochastic": Bounds(0.45),
}
"""By recipe. A quantized operand that a kernel takes from another rounding may be the next code, half a step away."""

ROW_BOUND = 0.5
"""The bound of the relative error of a single row of the output, and of the gradient of the input."""

REPEAT_BOUND = 1e-3
"""The bound of relative differences between repeats, for results that a kernel adds up with atomics."""

ATOMIC = {"sm100.grouped_dgrad_activation_quantize": ("probs", "expert_weight")}
"""The rules that add with atomics, and the gradients whose bits may therefore differ between repeats."""

BETWEEN_RANKS = (
    "sm90.gemm_activation_of_arriving_tokens",
    "sm90.fp8_gemm_activation_of_arriving_tokens",
    "sm90.gemm_of_leaving_rows",
    "sm90.fp8_gemm_of_leaving_rows",
    "sm90.dgrad_activation_of_arriving_gradients",
    "sm90.fp8_dgrad_activation_of_arriving_gradients",
    "sm90.gather_gradients_as_codes",
    "sm90.wgrad_beside_exchange",
    "sm90.fp8_wgrad_beside_exchange",
)
"""The rules that run beside an exchange between ranks, which one GPU does not have."""


@dataclass(frozen=True)
class Case:
    """A call of a small module; `fusedmoe.commands.verify.calls` has the modules, recipes and activations by name."""

    module: str
    recipe: str
    layout: Layout = UNEVEN
    activation: str = "swiglu"
    bias: bool = False
    frozen_bias: bool = False  # the experts have biases without gradients
    main_grad: bool = False  # weight gradients are added to ``main_grad``
    summed: bool = False  # weight gradients are added to ``grad``
    autocast: bool = False  # autocast casts the weights, which are fp32
    disabled: tuple[str, ...] = ()  # the rules that are switched off, so that others run

    @property
    def name(self) -> str:
        """The case in words."""
        extras = [self.activation] if self.activation != "swiglu" else []
        flags = ("bias", "frozen_bias", "main_grad", "summed", "autocast")
        extras += [flag.replace("frozen_", "frozen ") for flag in flags if getattr(self, flag)]
        extras += [f"without {pattern}" for pattern in self.disabled]
        return ", ".join([self.module.replace("_", " "), self.recipe, self.layout.name, *extras])


IN_ORDER = ("*.gathered_*",)
IN_EPILOGUES = ("*.activation", "*.dactivation")
"""So that products have activations in their epilogues also for few rows, where launches cost the most."""
TAIL = LAYOUTS[-1]
MANY_TOKENS = Layout("many tokens", (17000, 1, 0, 15000), 767)
"""So many that quantizing rows again in the backward pass costs less than keeping them."""


def cases_for(arch: int) -> tuple[Case, ...]:
    """Return the cases for an architecture, 90 for sm_90; none for one without kernels."""
    if arch == 90:
        return (*_SM90, *_of_recipes("fp8_block", "fp8_tensor", "fp8_tensor, delayed", "mxfp8"), *_SM90_FP8)
    return (*_of_recipes("mxfp8"), *_SM100, *_SM100_NVFP4) if arch in (100, 103) else ()


def _of_recipes(*recipes: str) -> tuple[Case, ...]:
    """Return the cases that every recipe has that quantizes."""
    return tuple(
        case
        for recipe in recipes
        for case in (
            *(Case("experts", recipe, layout) for layout in LAYOUTS),
            *(Case("experts", recipe, TAIL, activation) for activation in ("clamped swiglu", "geglu", "squared relu")),
            Case("experts", recipe, TAIL, bias=True),
            Case("experts", recipe, TAIL, main_grad=True),
            Case("experts", recipe, TAIL, autocast=True),
            Case("routed", recipe, LAYOUTS[1]),
            Case("routed", recipe, TAIL, disabled=IN_ORDER),
            Case("moe", recipe),
        )
    )


_SM90 = (
    *(Case("experts", "bf16", layout) for layout in LAYOUTS),
    Case("experts", "fp16", TAIL),
    *(Case("experts", "bf16", TAIL, activation) for activation in ("clamped swiglu", "geglu", "reglu", "squared relu")),
    Case("experts", "bf16", TAIL, bias=True),
    Case("experts", "bf16", TAIL, main_grad=True),
    Case("experts", "bf16", TAIL, summed=True),
    Case("routed", "bf16", LAYOUTS[1], summed=True),
    Case("experts", "bf16", TAIL, autocast=True),
    Case("routed", "bf16", LAYOUTS[1], autocast=True),
    *(Case("routed", "bf16", layout) for layout in LAYOUTS),
    *(Case("routed", "bf16", layout, disabled=IN_ORDER) for layout in LAYOUTS),
    Case("weighted_at_the_end", "bf16", LAYOUTS[1]),
    Case("routed_layer", "bf16", LAYOUTS[1]),
    Case("routed_layer", "bf16", TAIL, disabled=("sm90.gathered_wgrad_x",)),
    Case("moe", "bf16"),
    Case("moe", "bf16", disabled=("sm90.router_dispatch",)),
    Case("moe", "bf16", bias=True),
    Case("dense", "bf16"),
    Case("dense", "bf16", bias=True),
    Case("dense", "bf16", main_grad=True),
    Case("dense", "fp16", activation="squared relu"),
)
_SM90_FP8 = (
    Case("routed", "fp8_block", MANY_TOKENS),
    Case("stored_weights", "fp8_block"),
    Case("stored_weights", "fp8_block", TAIL),
)
_SM100 = (
    *(Case("experts", "mxfp8", TAIL, activation, frozen_bias=True) for activation in ("swiglu", "clamped swiglu")),
    Case("routed", "mxfp8", LAYOUTS[1], frozen_bias=True),
    *(Case("routed", "mxfp8", layout) for layout in LAYOUTS[2:6]),
    Case("routed_layer", "mxfp8", LAYOUTS[1]),
    Case("routed", "mxfp8", LAYOUTS[1], disabled=("sm100.quantize",)),
    Case("routed", "mxfp8", LAYOUTS[1], disabled=("sm100.grouped_gemm_combine", "sm100.grouped_dgrad_ddispatch")),
    Case("weighted_at_the_end", "mxfp8", LAYOUTS[1]),
    Case("dense", "mxfp8", bias=True),
    *(Case("routed", "bf16", layout) for layout in (*LAYOUTS[:3], TAIL)),
    *(Case("experts", "bf16", TAIL, activation) for activation in ("clamped swiglu", "geglu", "squared relu")),
    Case("moe", "bf16", bias=True),
)
_SM100_NVFP4 = (
    *(Case("experts", "nvfp4", layout, disabled=IN_EPILOGUES) for layout in LAYOUTS),
    Case("experts", "nvfp4", TAIL, "clamped swiglu", frozen_bias=True, disabled=IN_EPILOGUES),
    Case("experts", "nvfp4", TAIL, "squared relu", disabled=IN_EPILOGUES),
    Case("experts", "nvfp4", TAIL, bias=True),
    Case("experts", "nvfp4", TAIL, main_grad=True, disabled=IN_EPILOGUES),
    *(Case("routed", "nvfp4", layout, disabled=IN_EPILOGUES) for layout in (LAYOUTS[1], LAYOUTS[3])),
    Case("routed", "nvfp4", TAIL, disabled=(*IN_ORDER, *IN_EPILOGUES)),
    Case("moe", "nvfp4"),
    Case("experts", "nvfp4, stochastic", TAIL, disabled=IN_EPILOGUES),
)
