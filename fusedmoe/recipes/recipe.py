"""What a recipe is: frozen data and a rewrite of the chain that it applies to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusedmoe.errors import InputError

if TYPE_CHECKING:
    from fusedmoe.ops.op import Node


@dataclass(frozen=True)
class Recipe:
    """A numeric recipe. This base changes nothing: a chain computes in the dtype of its rows and parameters.

    A subclass is a frozen dataclass too (its values are part of every plan's key, so that a changed value is a new
    plan) and overrides `rewrite`.

    Attributes
    ----------
    name : str
        What ``explain()`` and the log call it.
    """

    name: str = "bf16"

    def rewrite(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return the chain with ops inserted where this recipe wants them.

        The nodes given must all be there in their order; an inserted op has no parameters, and a label of its own.
        """
        return nodes


BF16 = Recipe()

RECIPES: dict[str, Recipe] = {BF16.name: BF16}
"""The recipes that ``fm.recipe(name)`` knows."""


def resolve(recipe: str | Recipe) -> Recipe:
    """Return the recipe of a name, or the recipe itself."""
    if not isinstance(recipe, Recipe):
        found = next((known for name, known in RECIPES.items() if name == recipe), None)
        if found is None:
            raise InputError(f"recipe: expected a Recipe or one of {', '.join(map(repr, RECIPES))}, got {recipe!r}")
        return found
    try:
        hash(recipe)
    except TypeError as error:
        raise InputError(f"recipe {recipe.name!r} is part of every plan key and must be hashable: {error}") from None
    return recipe
