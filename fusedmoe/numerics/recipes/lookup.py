"""Look up a recipe by its name, or convert a recipe of Transformer Engine."""

from __future__ import annotations

from dataclasses import fields, replace

from fusedmoe.base.errors import InputError
from fusedmoe.numerics.formats.roles import WGRAD_BF16
from fusedmoe.numerics.recipes.recipe import MXFP8, NVFP4, FP8Block, FP8Row, FP8Tensor, Recipe
from fusedmoe.numerics.recipes.transformer_engine import converted

BF16 = Recipe()

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe for recipe in (BF16, FP8Tensor(), FP8Row(), FP8Block(), MXFP8(), NVFP4())
}
"""The recipes that ``fm.recipe(name)`` knows. ``":wgrad=bf16"`` may follow a name, for a recipe with that field."""


def named(name: str) -> Recipe | None:
    """Return the recipe for a name: ``"mxfp8"``, ``"mxfp8:wgrad=bf16"``; None for another name."""
    recipe = RECIPES.get(name.removesuffix(WGRAD_BF16))
    if recipe is None or not name.endswith(WGRAD_BF16):
        return recipe
    return replace(recipe, wgrad="bf16") if any(f.name == "wgrad" for f in fields(recipe)) else None  # type: ignore[call-arg]


def resolve(recipe: object) -> Recipe:
    """Return the recipe for a name or for a recipe of Transformer Engine; a `Recipe` is returned unchanged.

    Raises `InputError`: the argument is none of these, or is a recipe that cannot be hashed.
    """
    if isinstance(recipe, Recipe):
        try:
            hash(recipe)
        except TypeError as error:
            raise InputError(
                f"recipe {recipe.name!r} is part of every plan key and must be hashable: {error}"
            ) from None
        return recipe
    found = named(recipe) if isinstance(recipe, str) else converted(recipe)
    if found is None:
        raise InputError(
            f"recipe: expected a Recipe, a recipe of Transformer Engine, or one of {', '.join(map(repr, RECIPES))}, "
            f"which may end in {WGRAD_BF16!r} except 'bf16', got {recipe!r}"
        )
    return found


def shortest(recipe: Recipe) -> str | Recipe:
    """Return the recipe's name if `resolve` accepts it for this recipe, else the recipe itself."""
    return next((name for name in (recipe.name, recipe.name + WGRAD_BF16) if named(name) == recipe), recipe)
