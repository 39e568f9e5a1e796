"""Recipes: which numeric formats a chain computes in, as a rewrite of the chain."""

from fusedmoe.recipes.recipe import BF16, RECIPES, Recipe, resolve

__all__ = ["BF16", "RECIPES", "Recipe", "resolve"]
