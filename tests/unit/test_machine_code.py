"""The check of machine code: which loads from shared memory may be outstanding at a release."""

import pytest
from kit.machine_code import parse, unsafe_releases


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


def unsafe(*lines, **options):
    return unsafe_releases(parse(sass(*lines)), **options)


LOAD = "1 000000 LDS R8, [UR7+0xb0]"
REMOTE = "- 000000 SYNCS.ARRIVE.TRANS64.RED.ART0 RZ, [UR4], R2"
LOCAL = "- 000000 SYNCS.ARRIVE.TRANS64.ART0 RZ, [UR9+0x60], R0"
USE = "- 000010 SHFL.IDX PT, R15, R8, RZ, 0x1f"
END = "- 000000 EXIT"


# Machine code of a revision whose FP8 weight gradients hung on a GPU, and of the mended one.
OF_A_HANG = """
        /*25a0*/                   IMAD.MOV.U32 R2, RZ, RZ, 0x1 ;            /* 0x00000001ff027424 */
                                                                             /* 0x000fe200078e00ff */
        /*25b0*/                   LDS R8, [UR7+0xb0] ;                      /* 0x0000b007ff087984 */
                                                                             /* 0x000e660008000800 */
.L_x_141:
        /*25c0*/                   SYNCS.ARRIVE.TRANS64.RED.ART0 RZ, [UR4], R2 ; /* 0x00000002ffff79a7 */
                                                                             /* 0x0005e60008500404 */
"""
MENDED = """
        /*25a0*/                   LDS R8, [UR7+0xb0] ;                      /* 0x0000b007ff087984 */
                                                                             /* 0x000e620008000800 */
        /*25b0*/                   ULDC UR9, c[0x0][0x14] ;                  /* 0x0000050000097ab9 */
                                                                             /* 0x000fe40000000800 */
        /*25c0*/                   UIADD3 UR9, UR9, -0x1, URZ ;              /* 0xffffffff09097890 */
                                                                             /* 0x000fcc000fffe03f */
        /*25d0*/                   LOP3.LUT R2, R8, UR9, RZ, 0xc0, !PT ;     /* 0x0000000908027c12 */
                                                                             /* 0x002fca000f8ec0ff */
        /*25e0*/                   VIADD R2, R2, 0x1 ;                       /* 0x0000000102027836 */
                                                                             /* 0x000fc80000000000 */
.L_x_143:
        /*25f0*/                   SYNCS.ARRIVE.TRANS64.RED.ART0 RZ, [UR4], R2 ; /* 0x00000002ffff79a7 */
                                                                             /* 0x0003e60008500404 */
"""


def test_the_arrival_of_a_hang_is_found_and_the_mended_one_is_safe():
    (found,) = unsafe_releases(parse(OF_A_HANG))
    assert found == "25c0 SYNCS.ARRIVE.TRANS64.RED.ART0 RZ, [UR4], R2 during 25b0 LDS R8, [UR7+0xb0]"
    assert unsafe_releases(parse(MENDED)) == []


def test_a_use_after_the_arrival_is_too_late_and_one_before_it_orders_it():
    assert unsafe(LOAD, REMOTE, USE, END)
    assert not unsafe(LOAD, USE, REMOTE, END)


def test_the_arrival_itself_may_wait():
    assert not unsafe(LOAD, REMOTE.replace("000000", "000010", 1), END)
    assert unsafe(LOAD, REMOTE.replace("000000", "000100", 1), END)


def test_a_wait_for_a_later_load_covers_the_loads_before_it():
    earlier = "- 000000 LDS.64 R4, [R2]"
    assert not unsafe(earlier, LOAD, USE, REMOTE, END)
    assert len(unsafe(LOAD, earlier, USE, REMOTE, END)) == 1


def test_a_wait_for_another_counter_covers_nothing():
    assert unsafe("0 000000 LDSM.16.M88.4 R4, [R2]", USE, REMOTE, END)


def test_a_fence_orders():
    assert not unsafe(LOAD, "- 000000 MEMBAR.ALL.CTA", "1 000010 FENCE.VIEW.ASYNC.S", REMOTE, END)


def test_every_path_counts():
    branch = "- 000000 @P0 BRA `(.L_x_1)"
    assert unsafe(LOAD, branch, USE, ".L_x_1", REMOTE, END)
    assert not unsafe(LOAD, USE, branch, USE, ".L_x_1", REMOTE, END)
    assert not unsafe(LOAD, "- 000000 BRA `(.L_x_1)", REMOTE, ".L_x_1", USE, END)


def test_a_load_of_the_loop_before_is_found():
    loop = [".L_x_1", REMOTE, LOAD, "- 000000 @P0 BRA `(.L_x_1)", USE, END]
    assert len(unsafe(*loop)) == 1
    assert not unsafe(".L_x_1", REMOTE, LOAD, "- 000010 @P0 BRA `(.L_x_1)", END)


def test_memory_that_only_threads_write_may_be_released_early_in_the_own_cta():
    nothing, barriers, memory = range(0), range(0x40, 0x80), range(0xB0, 0xC0)
    assert unsafe(LOAD, LOCAL, USE, END)
    assert not unsafe(LOAD, LOCAL, USE, END, of_threads=(nothing, barriers))
    assert unsafe(LOAD, LOCAL.replace("0x60", "0x80"), USE, END, of_threads=(nothing, barriers))
    assert unsafe(LOAD, REMOTE.replace("UR4", "UR4+0x60"), USE, END, of_threads=(nothing, barriers))
    assert not unsafe(LOAD, REMOTE, USE, END, of_threads=(memory, barriers))
    assert unsafe(LOAD, "0 000000 LDS R9, [UR7+0xc0]", REMOTE, USE, END, of_threads=(memory, barriers))


def test_an_arrival_that_expects_bytes_releases_nothing():
    assert not unsafe(LOAD, "- 000000 SYNCS.ARRIVE.TRANS64 RZ, [UR7+0xa0], R2", USE, END)


def test_an_unknown_jump_is_an_error():
    with pytest.raises(AssertionError, match="no rule for 0010 BRX"):
        unsafe(LOAD, "- 000000 BRX R2", END)
