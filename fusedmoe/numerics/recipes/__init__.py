"""Recipes: the numeric formats in which the linear layers of a chain multiply."""

from fusedmoe.numerics.formats.roles import Roles
from fusedmoe.numerics.recipes.lookup import BF16, RECIPES, named, resolve, shortest
from fusedmoe.numerics.recipes.recipe import MXFP8, NVFP4, Custom, FP8Block, FP8Row, FP8Tensor, Node, Recipe

__all__ = [
    "BF16",
    "MXFP8",
    "NVFP4",
    "RECIPES",
    "Custom",
    "FP8Block",
    "FP8Row",
    "FP8Tensor",
    "Node",
    "Recipe",
    "Roles",
    "named",
    "resolve",
    "shortest",
]
