"""The kernels of activations compile for sm_90a without a GPU: nothing spills, and rows move 16 bytes per lane."""

from dataclasses import replace

import pytest

pytest.importorskip("cutlass")

from test_sm90_rows_compile import disassembled, starting

from fusedmoe.kernels.rows.activation.kernel import VECTORS, Activate, ActivateBackward

KINDS = [
    ("bf16", "swiglu", False, False, "fp32"),
    ("bf16", "swiglu", True, True, None),
    ("fp16", "geglu_tanh", True, False, "bf16"),
    ("bf16", "geglu_erf", False, False, "fp32"),
    ("bf16", "reglu", True, False, None),
    ("bf16", "squared_relu", False, False, "fp16"),
]
FORWARD = [Activate(*kind) for kind in KINDS]
BACKWARD = [ActivateBackward(*kind, kind[-1] is not None, i % 2 == 0) for i, kind in enumerate(KINDS)]


COVERING = [*FORWARD[::2], *BACKWARD[1::2]]  # each kind once


@pytest.mark.parametrize(
    "kernel",
    [*COVERING, *(pytest.param(k, marks=pytest.mark.slow) for k in (*FORWARD, *BACKWARD) if k not in COVERING)],
    ids=lambda k: k.symbol,
)
def test_rows_move_16_bytes_a_lane_with_several_loads_in_flight(kernel, monkeypatch, tmp_path):
    (code,) = disassembled(kernel, monkeypatch, tmp_path).values()
    assert not starting(code, ("STL", "LDL", "CALL", "ATOMG", "RED."))
    wide = [i for i in starting(code, "LDG") if i.endswith(".128")]
    rows = (2 if kernel.gated else 1) + isinstance(kernel, ActivateBackward)
    assert len(wide) == rows * VECTORS
    narrow = len(starting(code, "LDG")) - len(wide)
    each = VECTORS if isinstance(kernel, Activate) else 1  # vectors of several rows, or those of one
    assert narrow == (each if kernel.scale else 0)
    stored = starting(code, "STG")
    assert sum(not i.endswith(".128") for i in stored) == (1 if getattr(kernel, "sums", False) else 0)


def test_symbols_tell_the_kernels_apart():
    every = [*FORWARD, *BACKWARD]
    every += [replace(k, again=not k.again) for k in BACKWARD] + [replace(k, sums=not k.sums) for k in BACKWARD]
    assert len({kernel.symbol for kernel in every}) == len(every)
