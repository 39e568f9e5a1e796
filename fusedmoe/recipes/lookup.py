"""Look up a recipe by its name, or convert a recipe of Transformer Engine."""

from __future__ import annotations

from fusedmoe.errors import InputError
from fusedmoe.recipes.recipe import MXFP8, NVFP4, FP8Block, FP8Row, FP8Tensor, Recipe
from fusedmoe.recipes.transformer_engine import converted

BF16 = Recipe()

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe for recipe in (BF16, FP8Tensor(), FP8Row(), FP8Block(), MXFP8(), NVFP4())
}
"""The recipes that ``fm.recipe(name)`` knows."""


def resolve(recipe: object) -> Recipe:
    """Return the recipe for a name or for a recipe of Transformer Engine; a `Recipe` is returned unchanged.

    Raises
    ------
    InputError
        The argument is none of these, or is a recipe that cannot be hashed.
    """
    if isinstance(recipe, Recipe):
        try:
            hash(recipe)
        except TypeError as error:
            raise InputError(
                f"recipe {recipe.name!r} is part of every plan key and must be hashable: {error}"
            ) from None
        return recipe
    found = RECIPES.get(recipe) if isinstance(recipe, str) else converted(recipe)
    if found is None:
        raise InputError(
            f"recipe: expected a Recipe, a recipe of Transformer Engine, or one of {', '.join(map(repr, RECIPES))}, "
            f"got {recipe!r}"
        )
    return found


def shortest(recipe: Recipe) -> str | Recipe:
    """Return the recipe's name if `resolve` accepts it for this recipe, else the recipe itself."""
    return recipe.name if RECIPES.get(recipe.name) == recipe else recipe
