"""The checks of machine code: which loads from shared memory may be outstanding at a release, and which addresses are
used too early.
"""

import pytest
from kit.machine_code import early_addresses, parse, unsafe_releases


def sass(*lines):
    """Instructions as nvdisasm prints them. A line is a label, or an instruction after its counter and its mask."""
    text = []
    for place, line in enumerate(lines):
        if line.startswith("."):
            text.append(f"{line}:")
            continue
        counter, waits, instruction = line.split(maxsplit=2)
        control = (7 if counter == "-" else int(counter)) << 5 | 7 << 8 | int(waits, 2) << 11
        text.append(f"        /*{16 * place:04x}*/   {instruction} ;   /* 0x{0:016x} */")
        text.append(f"                                          /* 0x{control << 41:016x} */")
    return "\n".join(text)


LOAD, EARLIER = "1 000000 LDS R8, [UR7+0xb0]", "- 000000 LDS.64 R4, [R2]"
REMOTE = "- 000000 SYNCS.ARRIVE.TRANS64.RED.ART0 RZ, [UR4], R2"
USE = "- 000010 SHFL.IDX PT, R15, R8, RZ, 0x1f"
END = "- 000000 EXIT"
BRANCH, GO, LABEL = "- 000000 @P0 BRA `(.L_x_1)", "- 000000 BRA `(.L_x_1)", ".L_x_1"
FENCE = ("- 000000 MEMBAR.ALL.CTA", "1 000010 FENCE.VIEW.ASYNC.S")


@pytest.mark.parametrize(
    ("lines", "unsafe"),
    [
        ((LOAD, REMOTE, USE), 1),  # a use after the arrival is too late
        ((LOAD, USE, REMOTE), 0),
        ((LOAD, REMOTE.replace("000000", "000010", 1)), 0),  # the arrival itself waits
        ((LOAD, REMOTE.replace("000000", "000100", 1)), 1),  # for another counter
        ((EARLIER, LOAD, USE, REMOTE), 0),  # a wait for a later load covers the loads before it
        ((LOAD, EARLIER, USE, REMOTE), 1),
        (("0 000000 LDSM.16.M88.4 R4, [R2]", USE, REMOTE), 1),
        ((LOAD, *FENCE, REMOTE), 0),
        ((LOAD, BRANCH, USE, LABEL, REMOTE), 1),  # every path counts
        ((LOAD, USE, BRANCH, USE, LABEL, REMOTE), 0),
        ((LOAD, GO, REMOTE, LABEL, USE), 0),
        ((LABEL, REMOTE, LOAD, BRANCH, USE), 1),  # a load of the loop before
        ((LABEL, REMOTE, LOAD, BRANCH.replace("000000", "000010")), 0),
        ((LOAD, "- 000000 SYNCS.ARRIVE.TRANS64 RZ, [UR7+0xa0], R2", USE), 0),  # expects bytes, and releases nothing
    ],
)
def test_releases(lines, unsafe):
    assert len(unsafe_releases(parse(sass(*lines, END)))) == unsafe


@pytest.mark.parametrize(
    ("lines", "early"),
    [
        (("1 IMAD.WIDE R6, R6, 0x4, R4", "3 CS2R R8, SR_GLOBALTIMERLO"), 1),  # as ptxas 13.0 has it
        (("1 IMAD.WIDE R6, R6, 0x4, R4", "4 CS2R R8, SR_GLOBALTIMERLO"), 0),
        (("5 IMAD.WIDE.U32 R6, R6, 0x4, R4",), 0),
        (("4 IMAD.WIDE.U32 R6, R6, 0x4, R4",), 1),
        (("4 IMAD.WIDE R8, R6, 0x4, R4",), 0),  # another address
    ],
)
@pytest.mark.parametrize("access", ["@!P0 LDG.E.STRONG.GPU R3, desc[UR14][R6.64+-0x8]", "STG.E desc[UR14][R6.64], R9"])
def test_addresses(lines, early, access):
    counted = [line.split(maxsplit=1) for line in lines]
    text = sass(*[f"- 000000 {instruction}" for _, instruction in counted], f"- 000000 {access}", END)
    for cycles, instruction in counted:
        before, found, after = text.partition(instruction)
        control = f"{(int(cycles) | 7 << 5 | 7 << 8) << 41:016x}"
        text = before + found + after.replace(f"{(7 << 5 | 7 << 8) << 41:016x}", control, 1)
    assert len(early_addresses(parse(text))) == early
