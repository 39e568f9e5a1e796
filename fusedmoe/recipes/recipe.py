"""What a recipe is: frozen data and a rewrite of the chain that it applies to; and the recipes there are."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from fusedmoe.checks import FLAG, NOT_NEGATIVE, TEXT, check_fields
from fusedmoe.errors import InputError
from fusedmoe.formats import Delayed, Quantizer, ScaleRule
from fusedmoe.formats.roles import Roles, block_roles, mxfp8_roles, nvfp4_roles, row_roles, tensor_roles
from fusedmoe.ops.op import Node
from fusedmoe.ops.quantize import Quantize

if TYPE_CHECKING:
    from fusedmoe.ops.op import Op

_NOTHING = Roles(None, None, None)


@dataclass(frozen=True)
class Recipe:
    """A numeric recipe. This base quantizes nothing: a chain computes in the dtype of its rows and parameters.

    A subclass is a frozen dataclass too (its values are part of every plan's key, so that a changed value is a new
    plan) and overrides `roles`, or `rewrite`.

    Attributes
    ----------
    name : str
        What ``explain()`` and the log call it.
    """

    name: str = "bf16"

    def __post_init__(self) -> None:
        check_fields(self, {"name": TEXT, **{f.name: FLAG for f in fields(self) if isinstance(f.default, bool)}})

    def roles(self) -> Roles:
        """Return what the operands of every linear layer are quantized to."""
        return _NOTHING

    def rewrite(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return the chain with ops inserted where this recipe wants them.

        Before each linear layer a `Quantize` of its rows (``<label>:input``) and one of its weight
        (``<label>:weight``), behind it one of its gradient (``<label>:grad``): by the recipe of the layer, if it has
        one of its own. What a `Quantize` of the chain quantizes already is left as it is.

        The nodes given must all be there in their order; an inserted op has no parameters, and a label of its own.
        """
        rewritten: list[Node] = []
        for i, (label, op) in enumerate(nodes):
            roles = self._roles_of(op)
            if roles is not _NOTHING:
                before, behind = _quantizes_before(nodes, i), _quantizes_behind(nodes, i)
                if roles.weight is not None and not any(q.weight_quantizer for q in before):
                    rewritten.append(Node(f"{label}:weight", Quantize.for_layer(op, weight=roles.weight)))
                if roles.input is not None and not any(q.quantizer for q in before):
                    rewritten.append(Node(f"{label}:input", Quantize.for_layer(op, forward=roles.input)))
                rewritten.append(nodes[i])
                if roles.grad is not None and not any(q.grad_quantizer for q in behind):
                    rewritten.append(Node(f"{label}:grad", Quantize.for_layer(op, backward=roles.grad)))
            else:
                rewritten.append(nodes[i])
        return tuple(rewritten)

    def _roles_of(self, op: Op) -> Roles:
        if "weight" not in op.contracts:  # no linear layer
            return _NOTHING
        own = getattr(op, "recipe", None)
        recipe = self if own is None else resolve(own)
        roles = recipe.roles()
        if not isinstance(roles, Roles):
            raise InputError(f"recipe {recipe.name!r}: roles() must return fusedmoe.recipes.Roles, got {roles!r}")
        return roles


def _quantizes_before(nodes: tuple[Node, ...], i: int) -> list[Quantize]:
    found = []
    while i and isinstance(op := nodes[i - 1].op, Quantize):
        found.append(op)
        i -= 1
    return found


def _quantizes_behind(nodes: tuple[Node, ...], i: int) -> list[Quantize]:
    found = []
    while i + 1 < len(nodes) and isinstance(op := nodes[i + 1].op, Quantize):
        found.append(op)
        i += 1
    return found


@dataclass(frozen=True)
class FP8Tensor(Recipe):
    """FP8 with one scale for each expert's rows, each expert's gradients, and each expert's weight.

    Transformer Engine's ``Float8CurrentScaling`` and, with ``delayed``, its ``DelayedScaling``.

    Attributes
    ----------
    hybrid : bool
        Gradients in E5M2; in E4M3 otherwise, as all else.
    power_of_two : bool
        Scales are powers of two.
    delayed : Delayed or None
        Scales from the amax of steps before, instead of the tensor's own.
    """

    name: str = "fp8_tensor"
    hybrid: bool = True
    power_of_two: bool = False
    delayed: Delayed | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.delayed, Delayed | None):
            raise InputError(f"FP8Tensor: delayed: expected a fusedmoe.formats.Delayed or None, got {self.delayed!r}")

    def roles(self) -> Roles:
        return tensor_roles(self.hybrid, self.power_of_two, self.delayed)


@dataclass(frozen=True)
class FP8Row(Recipe):
    """FP8 with one scale for all elements of an expert that a product sums over together.

    Attributes
    ----------
    hybrid : bool
        Gradients in E5M2; in E4M3 otherwise, as all else.
    power_of_two : bool
        Scales are powers of two.
    """

    name: str = "fp8_row"
    hybrid: bool = False
    power_of_two: bool = False

    def roles(self) -> Roles:
        return row_roles(self.hybrid, self.power_of_two)


@dataclass(frozen=True)
class FP8Block(Recipe):
    """DeepSeek-V3's FP8: one scale for 1x128 elements of rows and gradients, and for 128x128 of weights.

    Transformer Engine's ``Float8BlockScaling``.

    Attributes
    ----------
    hybrid : bool
        Gradients in E5M2; in E4M3 otherwise, as all else.
    power_of_two : bool
        Scales are powers of two.
    amax_epsilon : float
        A lower bound on the largest magnitude of a block.
    """

    name: str = "fp8_block"
    hybrid: bool = False
    power_of_two: bool = True
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, {"amax_epsilon": NOT_NEGATIVE})

    def roles(self) -> Roles:
        return block_roles(self.hybrid, self.power_of_two, self.amax_epsilon)


@dataclass(frozen=True)
class MXFP8(Recipe):
    """MXFP8: one scale, a power of two, for 1x32 elements.

    Transformer Engine's ``MXFP8BlockScaling``.

    Attributes
    ----------
    hybrid : bool
        Gradients in E5M2; in E4M3 otherwise, as all else.
    scale_rule : str
        ``"rceil"``: the smallest scale that clips nothing; ``"floor"``: that of the MX specification, which clips.
    weight_2d : bool
        32x32 elements of weights share a scale, so that forward and backward see the same weight.
    """

    name: str = "mxfp8"
    hybrid: bool = False
    scale_rule: str = "rceil"
    weight_2d: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale_rule not in ("rceil", "floor"):
            raise InputError(f"MXFP8: scale_rule: expected 'rceil' or 'floor', got {self.scale_rule!r}")

    def roles(self) -> Roles:
        return mxfp8_roles(self.hybrid, ScaleRule(self.scale_rule), self.weight_2d)


@dataclass(frozen=True)
class NVFP4(Recipe):
    """NVFP4: four bits, one scale in E4M3 for 1x16 elements, one in fp32 for each expert.

    Transformer Engine's ``NVFP4BlockScaling``. Source: NVIDIA, "Pretraining Large Language Models with NVFP4".

    Attributes
    ----------
    hadamard : bool
        Rotate rows and gradients by a random Hadamard transform for the weight gradient.
    stochastic_rounding : bool
        Round gradients stochastically.
    weight_2d : bool
        16x16 elements of weights share a scale, so that forward and backward see the same weight.
    """

    name: str = "nvfp4"
    hadamard: bool = True
    stochastic_rounding: bool = True
    weight_2d: bool = True

    def roles(self) -> Roles:
        return nvfp4_roles(self.hadamard, self.stochastic_rounding, self.weight_2d)


@dataclass(frozen=True)
class Custom(Recipe):
    """A quantizer for each role: ``Custom("mine", input=Quantizer(mxfp8()), ...)``; None leaves it as it is.

    Attributes
    ----------
    input, weight, grad : Quantizer or None
        Of a linear layer's rows, of its weight, and of the gradient that it gets.
    """

    name: str = "custom"
    input: Quantizer | None = None
    weight: Quantizer | None = None
    grad: Quantizer | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for role in ("input", "weight", "grad"):
            if not isinstance(quantizer := getattr(self, role), Quantizer | None):
                raise InputError(f"Custom: {role}: expected a fusedmoe.Quantizer or None, got {quantizer!r}")

    def roles(self) -> Roles:
        return Roles(self.input, self.weight, self.grad)


BF16 = Recipe()

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe for recipe in (BF16, FP8Tensor(), FP8Row(), FP8Block(), MXFP8(), NVFP4())
}
"""The recipes that ``fm.recipe(name)`` knows."""


def resolve(recipe: object) -> Recipe:
    """Return the recipe of a name, of one of Transformer Engine's recipes, or the recipe itself."""
    if isinstance(recipe, Recipe):
        try:
            hash(recipe)
        except TypeError as error:
            raise InputError(
                f"recipe {recipe.name!r} is part of every plan key and must be hashable: {error}"
            ) from None
        return recipe
    found = RECIPES.get(recipe) if isinstance(recipe, str) else None
    if found is None:
        from fusedmoe.recipes.transformer_engine import converted

        found = converted(recipe)
    if found is None:
        raise InputError(
            f"recipe: expected a Recipe, a recipe of Transformer Engine's, or one of {', '.join(map(repr, RECIPES))}, "
            f"got {recipe!r}"
        )
    return found
