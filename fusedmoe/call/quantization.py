"""A recipe applied to a chain: it inserts `Quantize` ops before and after the linear layers."""

from __future__ import annotations

from collections.abc import Iterable

from fusedmoe.base.errors import InputError
from fusedmoe.numerics.formats import ScaleRule
from fusedmoe.numerics.recipes import FP8Block, Recipe, Roles
from fusedmoe.ops.op import Node, Op
from fusedmoe.ops.quantize import Quantize


def rewritten(recipe: Recipe, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the chain as the recipe rewrites it: by `Recipe.rewrite` if the recipe overrides it, else by its roles."""
    if type(recipe).rewrite is Recipe.rewrite:
        return by_roles(recipe, nodes)
    return tuple(Node(label, op) for label, op in recipe.rewrite(nodes))


def by_roles(recipe: Recipe, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the chain with `Quantize` ops around each linear layer.

    One op quantizes the weight (``<label>:weight``) and one the rows (``<label>:input``); both come before the layer.
    One op quantizes the gradient (``<label>:grad``) and comes after it. A layer's own recipe takes precedence. An
    operand that a `Quantize` of the chain already quantizes gets no second op.

    Without a recipe, a layer that stores its weight quantized has the recipe of its ``weight_format``: rows and
    gradients in blocks of 1x128, with the same rule for scales. A recipe gives it the quantizers of rows and gradients
    alone.
    """
    result: list[Node] = []
    for i, (label, op) in enumerate(nodes):
        roles = _roles_of(recipe, op)
        before, after = _adjacent(reversed(nodes[:i])), _adjacent(nodes[i + 1 :])
        if roles.weight is not None and not any(q.weight_quantizer for q in before):
            result.append(Node(f"{label}:weight", Quantize.for_layer(op, weight=roles.weight)))
        if roles.input is not None and not any(q.quantizer for q in before):
            result.append(Node(f"{label}:input", Quantize.for_layer(op, forward=roles.input)))
        result.append(nodes[i])
        if roles.grad is not None and not any(q.grad_quantizer for q in after):
            result.append(Node(f"{label}:grad", Quantize.for_layer(op, backward=roles.grad)))
    return tuple(result)


def _roles_of(recipe: Recipe, op: Op) -> Roles:
    if "weight" not in op.contracts:  # not a linear layer
        return Roles(None, None, None)
    own: Recipe | None = getattr(op, "recipe", None)
    recipe = recipe if own is None else own
    roles = recipe.roles()
    if not isinstance(roles, Roles):
        raise InputError(f"recipe {recipe.name!r}: roles() must return fusedmoe.numerics.recipes.Roles, got {roles!r}")
    if op.weight_format is None:
        return roles
    if own is None and roles == Recipe().roles():
        roles = FP8Block(power_of_two=op.weight_format.rule is ScaleRule.POWER_OF_TWO).roles()
    return roles._replace(weight=None)


def _adjacent(nodes: Iterable[Node]) -> list[Quantize]:
    """Return the `Quantize` ops before the first op of another class."""
    found = []
    for _, op in nodes:
        if not isinstance(op, Quantize):
            break
        found.append(op)
    return found
