"""Recipes: which numeric formats a chain computes in, as a rewrite of the chain."""

from fusedmoe.formats.roles import Roles
from fusedmoe.ops.op import Node
from fusedmoe.recipes.recipe import (
    BF16,
    MXFP8,
    NVFP4,
    RECIPES,
    Custom,
    FP8Block,
    FP8Row,
    FP8Tensor,
    Recipe,
    resolve,
)

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
    "resolve",
]
