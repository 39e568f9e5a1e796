"""The one exception for bad input."""

from __future__ import annotations


class InputError(ValueError):
    """An argument of an op is wrong: the message names op and argument, says what came and what was expected."""


NO_EXPERT_PARALLELISM = "expert parallelism: not yet: weights are one rank's, which holds all experts of the layer"
