"""Registers of a warp: arrays of 32 unsigned integers, or of booleans."""

from dataclasses import dataclass

import numpy as np

U2, U4, U8 = np.uint16, np.uint32, np.uint64
DTYPES = {"p": np.bool_, "rs": U2, "r": U4, "rd": U8}
BITS = {"p": 1, "rs": 16, "r": 32, "rd": 64}
GARBAGE = 0xBAD1BAD2BAD3BAD5  # in registers that nothing was written to
LANES = np.arange(32, dtype=U4)


@dataclass
class Result:
    """An instruction as Python."""

    run: object  # a function of the warp
    waits: bool = False  # whether `run` returns a condition to wait for
    members: object = None  # see Block
