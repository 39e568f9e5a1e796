"""The emulator finds the mistakes that it is there for: small programs in PTX, right and wrong."""

import re
import struct

import numpy as np
import pytest
import torch
from emulator import arithmetic, ptx
from emulator.barriers import EmulationError, MBarrier
from emulator.machine import Launch, Machine
from emulator.memory import AccessError, Shared
from emulator.tensor_map import TensorMap

PROGRAM = """
.version 8.8
.target sm_90a
.extern .shared .align 1024 .b8 __dynamic_shmem__0[];
.visible .entry program(
	.param .align 64 .b8 program_param_0[128],
	.param .u64 program_param_1
)
.reqntid {threads}, 1, 1
{{
	.reg .pred 	%p<20>;
	.reg .b16 	%rs<20>;
	.reg .b32 	%r<90>;
	.reg .b64 	%rd<20>;
	ld.param.b64 	%rd1, [program_param_1];
	mov.u32 	%r1, %tid.x;
	mov.b32 	%r2, __dynamic_shmem__0;
	mul.wide.u32 	%rd2, %r1, 4;
	add.s64 	%rd3, %rd1, %rd2;
{body}
	ret;
}}
"""


def run(body, out, *, threads=32, descriptor=bytes(128), cluster=1, eagerness=0.3, seed=0, memory=()):
    """Run statements that write to ``out``."""
    (program,) = ptx.parse(PROGRAM.format(body=body, threads=threads))
    machine = Machine(seed, eagerness)
    for tensor in (out, *memory):
        machine.memory.add(tensor)
    arguments = (descriptor, struct.pack("<Q", out.data_ptr()))
    machine.run(Launch(program, (cluster, 1, 1), (threads, 1, 1), (cluster, 1, 1), 8192, arguments))
    return out


def ints(count):
    return torch.full((count,), -1, dtype=torch.int32)


ELEMENTS = {
    torch.uint8: 0, torch.float8_e4m3fn: 0, torch.float8_e5m2: 0, torch.int32: 2, torch.float16: 6, torch.float32: 7,
    torch.bfloat16: 10,
}  # fmt: skip


def descriptor(tensor, box, swizzle=0):
    """The descriptor of copies of boxes of a matrix."""
    (rows, columns), (height, width) = tensor.shape, box
    words = [0] * 16
    words[0] = tensor.data_ptr()
    pitch = tensor.stride(0) * tensor.itemsize
    words[1] = 1 << 4 | ELEMENTS[tensor.dtype] << 7 | {0: 0, 32: 1, 64: 2, 128: 3}[swizzle] << 13 | pitch >> 4 << 32
    words[4] = columns - 1 | rows - 1 << 32
    words[6], words[7] = width - 1 << 56, height - 1
    return struct.pack("<16Q", *words)


# ---- lanes


def test_lanes_that_diverge_join_again():
    body = """
	and.b32 	%r3, %r1, 3;
	mov.b32 	%r4, 0;
$L_loop:
	setp.ge.s32 	%p1, %r4, %r3;
	@%p1 bra 	$L_end;
	add.s32 	%r4, %r4, 1;
	bra.uni 	$L_loop;
$L_end:
	vote.sync.ballot.b32 	%r5, %p1, -1;
	popc.b32 	%r6, %r5;
	mad.lo.s32 	%r7, %r6, 10, %r4;
	st.global.b32 	[%rd3], %r7;
"""
    assert run(body, ints(32)).tolist() == [320 + i % 4 for i in range(32)]


@pytest.mark.parametrize(
    ("mode", "by", "clamp", "want"),
    [
        ("idx", 5, 31, [5] * 32),
        ("bfly", 4, 31, [i ^ 4 for i in range(32)]),
        ("up", 1, 0, [max(i - 1, 0) for i in range(32)]),
        ("down", 2, 31, [i + 2 if i < 30 else i for i in range(32)]),
        ("bfly", 1, 0x181F, [i ^ 1 for i in range(32)]),
    ],
)
def test_shuffles(mode, by, clamp, want):
    body = f"shfl.sync.{mode}.b32 \t%r3, %r1, {by}, {clamp}, -1;\n\tst.global.b32 \t[%rd3], %r3;"
    assert run(body, ints(32)).tolist() == want


def test_one_lane_is_elected():
    body = """
	elect.sync 	%r3|%p1, -1;
	selp.b32 	%r4, 7, %r3, %p1;
	st.global.b32 	[%rd3], %r4;
"""
    assert run(body, ints(32)).tolist() == [7] + [0] * 31


@pytest.mark.parametrize("block", ["{{ .reg .b32 z; {} }}", "{{\n.reg .b32 z;\n{}\n}}"], ids=["one line", "lines"])
def test_blocks_in_braces_have_their_own_registers(block):
    body = block.format("mov.u32 z, %nctaid.x; add.s32 %r3, z, %r1;") + "\n"
    body += block.replace("b32", "b64").format("mov.b64 z, 5; cvt.u32.u64 %r4, z; add.s32 %r3, %r3, %r4;")
    assert run(body + "\n\tst.global.b32 \t[%rd3], %r3;", ints(32)).tolist() == list(range(6, 38))


# ---- memory


def test_access_outside_of_the_tensors():
    with pytest.raises(EmulationError, match=r"warp 0, line \d+, st.global.b32: .* is not of one tensor"):
        run("st.global.b32 \t[%rd3], %r1;", ints(31))


def test_access_outside_of_shared_memory():
    with pytest.raises(EmulationError, match="of 0x2400 bytes"):
        run("st.shared.b32 \t[%r2+8192], %r1;", ints(32))


def test_unaligned_access():
    with pytest.raises(EmulationError, match="not a multiple of 4"):
        run("add.s32 \t%r3, %r2, 2;\n\tst.shared.b32 \t[%r3], %r1;", ints(32))


def test_shared_memory_that_was_not_written_is_nan():
    out = run("ld.shared.b32 \t%r3, [%r2];\n\tst.global.b32 \t[%rd3], %r3;", ints(32))
    assert out.view(torch.float32).isnan().all()


def test_atomics_return_what_was_there():
    out = run("atom.global.add.u32 \t%r3, [%rd1], 2;\n\tst.global.b32 \t[%rd3+4], %r3;", torch.zeros(33).int())
    assert out.tolist()[1:] == list(range(0, 64, 2))
    assert out[0] == 64


RED = """
	cvt.rn.f32.u32 	%r10, %r1;
	mov.b32 	%r11, 1065353216;
	mul.wide.u32 	%rd4, %r1, {bytes};
	add.s64 	%rd5, %rd1, %rd4;
	red.relaxed.gpu.global.add.v4.f32 	[%rd5], {{%r10, %r11, %r11, %r10}};
"""


def test_a_vector_is_added_to_memory():
    lanes = torch.arange(32.0)
    out = run(RED.format(bytes=16), torch.full((128,), 10.0)).view(32, 4)
    assert torch.equal(out, 10 + torch.stack([lanes, torch.ones(32), torch.ones(32), lanes], 1))
    with pytest.raises(EmulationError, match="a vector is not aligned"):
        run(RED.format(bytes=12), torch.zeros(128))


@pytest.mark.parametrize("space", ["shared", "global"])
@pytest.mark.parametrize(
    ("type_", "count", "kind"),
    [("b16", 2, "rs"), ("b16", 4, "rs"), ("b32", 2, "r"), ("b32", 4, "r"), ("b64", 2, "rd"), ("u8", 4, "rs")],
)
def test_vectors_of_loads_and_stores(space, type_, count, kind):
    size = int(type_[1:]) * count // 8
    items = ", ".join(f"%{kind}{10 + i}" for i in range(count))
    address = {"shared": "%r4", "global": "%rd5"}[space]
    body = f"""
	mul.lo.s32 	%r3, %r1, {size};
	add.s32 	%r4, %r2, %r3;
	cvt.u64.u32 	%rd4, %r3;
	add.s64 	%rd5, %rd1, %rd4;
	ld.global.v{count}.{type_} 	{{{items}}}, [%rd5];
	st.{space}.v{count}.{type_} 	[{address}+{32 * size}], {{{items}}};
	ld.{space}.v{count}.{type_} 	{{{items}}}, [{address}+{32 * size}];
	st.global.v{count}.{type_} 	[%rd5+{32 * size}], {{{items}}};
"""
    out = torch.zeros(64 * size, dtype=torch.uint8)
    out[: 32 * size] = torch.arange(32 * size) % 251
    run(body, out)
    assert torch.equal(out[: 32 * size], out[32 * size :])
    with pytest.raises(EmulationError, match="a vector is not aligned"):
        run(body.replace(f"[{address}+{32 * size}]", f"[{address}+{int(type_[1:]) // 8}]"), out)


MATRICES = """
	shl.b32 	%r3, %r1, 4;
	add.s32 	%r4, %r2, %r3;
	mad.lo.s32 	%r10, %r1, 131072, 65536;
	mad.lo.s32 	%r10, %r1, 2, %r10;
	add.s32 	%r11, %r10, 4194368;
	add.s32 	%r12, %r11, 4194368;
	add.s32 	%r13, %r12, 4194368;
	stmatrix.sync.aligned.m8n8.x{count}{stored}.shared.b16 	[%r4{offset}], {{{sources}}};
	ldmatrix.sync.aligned.m8n8.x{count}{loaded}.shared.b16 	{{{targets}}}, [%r4];
	mul.wide.u32 	%rd4, %r1, {bytes};
	add.s64 	%rd5, %rd1, %rd4;
	st.global.{vector}b32 	[%rd5], {{{targets}}};
"""


def matrices(count, stored="", loaded="", offset=""):
    """Store and load matrices with the elements 0 to 63, 64 to 127 and so on."""
    sources, targets = (", ".join(f"%r{first + i}" for i in range(count)) for first in (10, 20))
    vector = f"v{count}." if count > 1 else ""
    body = MATRICES.format(
        count=count, stored=stored, loaded=loaded, offset=offset, sources=sources, targets=targets, vector=vector,
        bytes=4 * count,
    )  # fmt: skip
    out = run(body if count > 1 else body.replace("{%r20};", "%r20;"), ints(32 * count))
    return out.view(torch.int16).view(32, count, 2).transpose(0, 1).reshape(count, 8, 8)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_and_their_transposes(count):
    want = torch.arange(64 * count).short().view(count, 8, 8)
    for transposed in ("", ".trans"):
        assert torch.equal(matrices(count, transposed, transposed), want)
    for transposed in ({"stored": ".trans"}, {"loaded": ".trans"}):
        assert torch.equal(matrices(count, **transposed), want.transpose(1, 2))


def test_a_row_of_a_matrix_that_is_not_aligned():
    with pytest.raises(EmulationError, match="not aligned to 16 bytes"):
        matrices(4, offset="+8")


@pytest.mark.parametrize(
    ("opcode", "want"),
    [("add.u32", 496), ("max.s32", 31), ("min.u32", 0), ("or.b32", 31), ("and.b32", 0), ("xor.b32", 0)],
)
def test_reductions_over_the_lanes(opcode, want):
    body = f"redux.sync.{opcode} \t%r3, %r1, -1;\n\tst.global.b32 \t[%rd3], %r3;"
    assert run(body, ints(32)).tolist() == [want] * 32


@pytest.mark.parametrize(
    ("opcode", "want"),
    [("max.s32", 30), ("max.u32", -1), ("min.s32", -1), ("min.u32", 0), ("add.u32", 5 + 496 - 32)],
)
def test_atomics_without_a_result(opcode, want):
    body = f"sub.s32 \t%r3, %r1, 1;\n\tred.global.gpu.{opcode} \t[%rd1], %r3;"
    assert run(body, torch.tensor([5], dtype=torch.int32)).item() == want


def test_atomics_of_fp32():
    out = run("atom.global.add.f32 \t%r3, [%rd1], 0f3F800000;\n\tst.global.b32 \t[%rd3+4], %r3;", torch.ones(33) / 2)
    assert out.tolist() == [32.5, *(i + 0.5 for i in range(32))]


# ---- barriers


def test_a_warp_waits_at_a_barrier():
    exchange = """
	shl.b32 	%r3, %r1, 2;
	add.s32 	%r4, %r2, %r3;
	st.shared.b32 	[%r4], %r1;
	{barrier}
	xor.b32 	%r5, %r3, 128;
	add.s32 	%r6, %r2, %r5;
	ld.shared.b32 	%r7, [%r6];
	st.global.b32 	[%rd3], %r7;
"""
    want = [i ^ 32 for i in range(64)]
    for seed in range(4):
        assert run(exchange.format(barrier="bar.sync \t1, 64;"), ints(64), threads=64, seed=seed).tolist() == want
    without = [run(exchange.format(barrier=""), ints(64), threads=64, seed=seed).tolist() for seed in range(4)]
    assert want not in without


def test_a_warp_arrives_at_a_barrier_and_goes_on():
    body = """
	shl.b32 	%r3, %r1, 2;
	add.s32 	%r4, %r2, %r3;
	setp.lt.u32 	%p1, %r1, 32;
	@%p1 bra 	$L_wait;
	st.shared.b32 	[%r4], %r1;
	bar.arrive 	2, 64;
	bra.uni 	$L_end;
$L_wait:
	bar.sync 	2, 64;
	ld.shared.b32 	%r5, [%r4+128];
	st.global.b32 	[%rd3], %r5;
$L_end:
"""
    for seed in range(4):
        out = run(body, ints(64), threads=64, seed=seed)
        assert out.tolist() == [*range(32, 64), *[-1] * 32]
    with pytest.raises(EmulationError, match="no warp can go on"):
        run(body.replace("bar.arrive \t2", "bar.arrive \t3"), ints(64), threads=64)


def test_a_barrier_that_not_all_reach():
    body = "setp.lt.u32 \t%p1, %r1, 32;\n\t@%p1 bra \t$L_end;\n\tbar.sync \t1, 64;\n$L_end:"
    with pytest.raises(EmulationError, match=r"no warp can go on:\nCTA \(0, 0, 0\), warp 1: lanes 0xffffffff at line"):
        run(body, ints(64), threads=64)


def test_an_mbarrier_counts_arrivals_and_bytes():
    barrier = MBarrier(2)
    barrier.expect(16)
    barrier.arrive()
    barrier.receive(16)
    assert not barrier.passed(0)
    barrier.arrive()
    assert barrier.passed(0)
    assert not barrier.passed(1)
    with pytest.raises(EmulationError, match="more than 2 arrivals"):
        barrier.arrive(3)


def test_an_mbarrier_that_nobody_initialized():
    with pytest.raises(EmulationError, match="no mbarrier was initialized"):
        run("mbarrier.arrive.shared.b64 \t%rd9, [%r2];", ints(32))


# ---- copies

LOAD = """
	setp.ne.b32 	%p1, %r1, 0;
	@%p1 bra 	$L_ready;
	mbarrier.init.shared.b64 	[%r2], 1;
$L_ready:
	bar.sync 	0;
	mov.b64 	%rd4, program_param_0;
	cvta.param.u64 	%rd5, %rd4;
	@%p1 bra 	$L_loaded;
	mbarrier.arrive.expect_tx.shared.b64 	%rd6, [%r2], 256;
	mov.b64 	%rd7, 0;
	cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint \
[%r2+1024], [%rd5, {{{x}, {y}}}], [%r2], %rd7;
$L_loaded:
	{wait}
	shl.b32 	%r3, %r1, 2;
	add.s32 	%r4, %r2, %r3;
	ld.shared.b32 	%r5, [%r4+1024];
	ld.shared.b32 	%r6, [%r4+1152];
	st.global.b32 	[%rd3], %r5;
	st.global.b32 	[%rd3+128], %r6;
"""
WAIT = """{
	.reg .pred 	P1;
	LAB_WAIT:
	mbarrier.try_wait.parity.shared.b64 	P1, [%r2], 0, 10000000;
	@P1 bra.uni 	DONE;
	bra.uni 	LAB_WAIT;
	DONE:
	}"""


@pytest.mark.parametrize("eagerness", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("x", "y"), [(0, 0), (4, 1), (-4, -2), (16, 3), (40, 0)])
def test_a_copy_of_a_box_has_zeros_outside_of_the_tensor(x, y, eagerness):
    source = torch.arange(5 * 20, dtype=torch.float32).view(5, 20) + 1
    out = torch.zeros(64)
    run(
        LOAD.format(x=x, y=y, wait=WAIT),
        out,
        descriptor=descriptor(source, (8, 8)),
        memory=[source],
        eagerness=eagerness,
    )
    padded = torch.zeros(40, 80)
    padded[10:15, 10:30] = source
    assert torch.equal(out.view(8, 8), padded[10 + y : 18 + y, 10 + x : 18 + x])


def test_a_read_that_does_not_wait_for_a_copy():
    source = torch.ones(8, 8)
    with pytest.raises(EmulationError, match="a copy is still writing"):
        run(LOAD.format(x=0, y=0, wait=""), torch.zeros(64), descriptor=descriptor(source, (8, 8)), memory=[source])


STORE = """
	shl.b32 	%r3, %r1, 2;
	add.s32 	%r4, %r2, %r3;
	st.shared.b32 	[%r4], %r1;
	st.shared.b32 	[%r4+128], %r1;
	{fence}
	bar.warp.sync 	-1;
	mov.b64 	%rd4, program_param_0;
	cvta.param.u64 	%rd5, %rd4;
	mov.b64 	%rd7, 0;
	cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%rd5, {{2, 1}}], [%r2], %rd7;
	cp.async.bulk.commit_group;
	{wait}
	st.shared.b32 	[%r4], 0;
"""
FENCE, WAIT_READ = "fence.proxy.async.shared::cta;", "cp.async.bulk.wait_group.read \t0;"


@pytest.mark.parametrize("eagerness", [0.0, 0.3, 1.0])
def test_a_store_of_a_box_ends_with_the_tensor(eagerness):
    target, out = torch.zeros(6, 8, dtype=torch.int32), ints(32)
    body = STORE.format(fence=FENCE, wait=WAIT_READ)
    run(body, out, descriptor=descriptor(target, (8, 8)), memory=[target], eagerness=eagerness)
    box = torch.arange(32).repeat(2).view(8, 8).int()
    assert torch.equal(target[1:, 2:], box[:5, :6])
    assert not target[0].any()
    assert not target[:, :2].any()


def test_a_store_without_a_fence():
    target = torch.zeros(8, 8)
    with pytest.raises(EmulationError, match="without fence"):
        run(STORE.format(fence="", wait=WAIT_READ), ints(32), descriptor=descriptor(target, (8, 8)), memory=[target])


def test_a_write_that_does_not_wait_for_a_store():
    target = torch.zeros(8, 8)
    body = STORE.format(fence=FENCE, wait="")
    with pytest.raises(EmulationError, match="still reading"):
        run(body, ints(32), descriptor=descriptor(target, (8, 8)), memory=[target], eagerness=0.0)


def test_a_box_that_leaves_the_memory_of_the_tensor():
    target = torch.zeros(8, 8)
    larger = bytearray(descriptor(target, (8, 8)))
    larger[36:40] = struct.pack("<I", 11)  # claims 12 rows
    with pytest.raises(AccessError, match="is not of one tensor"):
        run(STORE.format(fence=FENCE, wait=WAIT_READ), ints(32), descriptor=bytes(larger), memory=[target])


@pytest.mark.parametrize("group", [0, 1])
def test_copies_of_16_bytes_are_there_after_the_wait(group):
    source = torch.arange(128, dtype=torch.int32)
    body = f"""
	shl.b32 	%r3, %r1, 4;
	add.s32 	%r4, %r2, %r3;
	mul.wide.u32 	%rd4, %r1, 16;
	add.s64 	%rd5, %rd1, %rd4;
	and.b32 	%r5, %r1, 1;
	shl.b32 	%r6, %r5, 4;
	cp.async.cg.shared.global 	[%r4], [%rd5], 16, %r6;
	cp.async.commit_group;
	cp.async.wait_group 	{group};
	ld.shared.b32 	%r7, [%r4+12];
	st.global.b32 	[%rd3], %r7;
"""
    if group:
        with pytest.raises(EmulationError, match="a copy is still writing"):
            run(body, source, eagerness=0.0)
    else:
        out = run(body, source)
        assert out[:32].tolist() == [4 * i + 3 if i % 2 else 0 for i in range(32)]


# ---- loads that are outstanding at an arrival

WAIT_ARRIVAL = WAIT.replace("[%r2]", "[%r2+8]")
READ_AND_WRITE = """
	setp.ne.b32 	%p1, %r1, 0;
	shl.b32 	%r3, %r1, 2;
	add.s32 	%r4, %r2, %r3;
	@%p1 bra 	$L_ready;
	mbarrier.init.shared.b64 	[%r2], 1;
	mbarrier.init.shared.b64 	[%r2+8], 1;
$L_ready:
	bar.sync 	0;
	setp.ge.u32 	%p2, %r1, 32;
	@%p2 bra 	$L_write;
	{read}
	st.global.b32 	[%rd3], %r5;
	bra.uni 	$L_end;
$L_write:
	{wait}
	{write}
$L_end:
"""
LOAD_WORD = "ld.shared.b32 \t%r5, [%r4+1024];"
ARRIVE = "@!%p1 mbarrier.arrive.shared.b64 \t%rd9, [%r2+8];"
COPY = """setp.ne.b32 	%p3, %r1, 32;
	@%p3 bra 	$L_end;
	mov.b64 	%rd4, program_param_0;
	cvta.param.u64 	%rd5, %rd4;
	mbarrier.arrive.expect_tx.shared.b64 	%rd6, [%r2], 256;
	mov.b64 	%rd7, 0;
	cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint \
[%r2+1024], [%rd5, {0, 0}], [%r2], %rd7;"""
ONE_OF = ("mov.b32 \t%r6, %r4;", "@!%p2 bra \t$L_skip;", "mov.b32 \t%r6, %r5;", "$L_skip:")  # the first one
RACE = "a load may still be reading: CTA {cta}, warp 0, line {line}, {name}"


def read_and_write(*read, wait=WAIT_ARRIVAL, write=COPY, eagerness=0.0, seed=0):
    """One warp reads 128 bytes that are -1. The other one writes them after it has waited at a barrier."""
    body = READ_AND_WRITE.format(read="\n\t".join(read), wait=wait, write=write)
    source = torch.ones(8, 8, dtype=torch.int32)
    out = torch.zeros(64, dtype=torch.int32)
    run(body, out, threads=64, descriptor=descriptor(source, (8, 8)), memory=[source], eagerness=eagerness, seed=seed)
    assert out[:32].tolist() == [-1] * 32


@pytest.mark.parametrize(
    "read",
    [
        (LOAD_WORD, ARRIVE),
        ("@%p1 " + LOAD_WORD, ARRIVE),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 \t{%r5}, [%r4+1024];".replace("%r4", "%r6"), ARRIVE),
        (LOAD_WORD, "add.s32 \t%r6, %r5, 1;", "mov.b32 \t%r7, %r6;", ARRIVE),
        ("ld.shared.b32 \t%r6, [%r4];", LOAD_WORD, "shfl.sync.bfly.b32 \t%r7, %r6, 1, 31, -1;", ARRIVE),
        (LOAD_WORD, "@!%p2 bra \t$L_skip;", "shfl.sync.bfly.b32 \t%r7, %r5, 1, 31, -1;", "$L_skip:", ARRIVE),
        (LOAD_WORD, "mov.b32 \t%r6, %r5;", "mov.b32 \t%r6, %r4;", "shfl.sync.idx.b32 \t%r7, %r6, 1, 31, -1;", ARRIVE),
        (LOAD_WORD, *ONE_OF, "shfl.sync.bfly.b32 \t%r7, %r6, 1, 31, -1;", ARRIVE),
        ("fence.proxy.async.shared::cta;", LOAD_WORD, ARRIVE),
        (LOAD_WORD, ARRIVE, "fence.proxy.async.shared::cta;"),
    ],
    ids=[
        "one", "predicated", "matrix", "arithmetic", "use of an earlier load", "use on another path", "other register",
        "the load or an address",
        "fence before", "fence after",
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(2))
def test_a_copy_that_overwrites_what_a_load_may_still_read(read, seed):
    name = "ldmatrix" if read[0].startswith("ldmatrix") else "ld.shared.b32"
    row = "shl.b32 \t%r6, %r1, 4;\n\tadd.s32 \t%r6, %r2, %r6;"
    with pytest.raises(EmulationError, match=RACE.format(cta=r"\(0, 0, 0\)", line=r"\d+", name=name)):
        read_and_write(row, *read, seed=seed)


@pytest.mark.parametrize(
    "read",
    [
        ("shfl.sync.bfly.b32 \t%r6, %r5, 1, 31, -1;", ARRIVE),
        ("@%p2 bra \t$L_skip;", "shfl.sync.bfly.b32 \t%r7, %r5, 1, 31, -1;", "$L_skip:", ARRIVE),
        ("setp.eq.b32 \t%p4, %r5, 7;", "@%p4 bra \t$L_end;", ARRIVE),
        ("ld.shared.b32 \t%r6, [%r4];", "shfl.sync.bfly.b32 \t%r7, %r6, 1, 31, -1;", ARRIVE),
        ("and.b32 \t%r6, %r5, 8;", "add.s32 \t%r7, %r2, %r6;", ARRIVE.replace("%r2+8", "%r7")),
        ("fence.proxy.async.shared::cta;", ARRIVE),
        ("fence.acq_rel.cta;", ARRIVE),
        ("fence.sc.cta;", ARRIVE),
        ("membar.cta;", ARRIVE),
        (ARRIVE.replace("arrive", "arrive.release.cluster"),),
    ],
    ids=[
        "use", "use on the path taken", "branch", "use of a later load", "address of the arrival", "fence.proxy",
        "fence.acq_rel", "fence.sc", "membar", "release.cluster",
    ],
)  # fmt: skip
@pytest.mark.parametrize("eagerness", [0.0, 0.3, 1.0])
def test_loads_that_are_ordered_before_an_arrival(read, eagerness):
    read_and_write(LOAD_WORD, *read, eagerness=eagerness)


FENCE_AND_COPY = "fence.proxy.async.shared::cta;\n\t" + COPY
STORE_WORD = "st.shared.b32 \t[%r4+896], %r1;"
COPY_BY_THREADS = """cp.async.cg.shared.global 	[%r2+1024], [%rd1], 16;
	cp.async.commit_group;
	cp.async.wait_group 	0;"""


@pytest.mark.parametrize("write", [FENCE_AND_COPY, STORE_WORD, COPY_BY_THREADS], ids=["fence", "store", "cp.async"])
@pytest.mark.parametrize("eagerness", [0.0, 0.3, 1.0])
def test_an_arrival_orders_loads_before_stores_and_fences_of_the_cta(write, eagerness):
    read_and_write(LOAD_WORD, ARRIVE, write=write, eagerness=eagerness)


@pytest.mark.parametrize("arrive", ["bar.sync", "bar.arrive"])
def test_a_barrier_of_the_cta_is_an_arrival(arrive):
    read, wait = (LOAD_WORD, f"{arrive} \t1, 64;"), "bar.sync \t1, 64;"
    read_and_write(*read, wait=wait, write=FENCE_AND_COPY)
    with pytest.raises(EmulationError, match="a load may still be reading"):
        read_and_write(*read, wait=wait)


def test_a_copy_elsewhere_overwrites_no_load():
    for at in (768, 1024 + 256):
        read_and_write(LOAD_WORD.replace("1024", str(at)), ARRIVE)


SEND = """
	setp.ne.b32 	%p1, %r1, 0;
	mapa.shared::cluster.u32 	%r3, %r2, 0;
	mapa.shared::cluster.u32 	%r4, %r2, 1;
	mov.u32 	%r9, %cluster_ctarank;
	mbarrier.init.shared.b64 	[%r2], 1;
	mbarrier.init.shared.b64 	[%r2+8], 1;
	barrier.cluster.arrive;
	barrier.cluster.wait;
	setp.eq.b32 	%p2, %r9, 0;
	@%p2 bra 	$L_send;
	ld.shared.b32 	%r5, [%r2+{at}];
	{order}
	@!%p1 mbarrier.arrive{scope}.shared::cluster.b64 	_, [%r3+8];
	st.global.b32 	[%rd3], %r5;
	bra.uni 	$L_end;
$L_send:
	{wait}
	@!%p1 st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 	[%r4+1024], %r9, [%r4];
$L_end:
	barrier.cluster.arrive;
	barrier.cluster.wait;
"""


def send(at=1024, order="", scope="", eagerness=0.0, seed=0):
    """CTA 1 reads a word that is -1. CTA 0 writes it after CTA 1 has arrived."""
    body = SEND.format(at=at, order=order, scope=scope, wait=WAIT_ARRIVAL)
    out = torch.zeros(32, dtype=torch.int32)
    assert run(body, out, cluster=2, eagerness=eagerness, seed=seed).tolist() == [-1] * 32


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", [{}, {"scope": ".release.cta"}, {"scope": ".relaxed.cluster"}], ids=str)
def test_a_word_of_another_cta_that_overwrites_what_a_load_may_still_read(case, seed):
    with pytest.raises(EmulationError, match=RACE.format(cta=r"\(1, 0, 0\)", line=r"\d+", name="ld.shared.b32")):
        send(**case, seed=seed)


@pytest.mark.parametrize(
    "case",
    [
        {"scope": ".release.cluster"},
        {"order": "fence.acq_rel.cluster;"},
        {"order": "shfl.sync.idx.b32 \t%r6, %r5, 0, 31, -1;"},
        {"at": 1020},
        {"at": 1028},
    ],
    ids=str,
)
@pytest.mark.parametrize("eagerness", [0.0, 0.3, 1.0])
def test_words_of_another_cta_that_overwrite_no_load(case, eagerness):
    send(**case, eagerness=eagerness)


# ---- products

PRODUCT = """
	mov.u32 	%r3, %tid.x;
	shl.b32 	%r4, %r3, 4;
	add.s32 	%r5, %r2, %r4;
	mov.b32 	%r6, {ones};
	st.shared.v4.b32 	[%r5], {{%r6, %r6, %r6, %r6}};
	st.shared.v4.b32 	[%r5+2048], {{%r6, %r6, %r6, %r6}};
	{fence}
	bar.sync 	0;
	mov.b64 	%rd8, 4611686293305294912;
	wgmma.fence.sync.aligned;
	setp.ne.b32 	%p2, 0, 0;
	wgmma.mma_async.sync.aligned.m64n8{types} {{%r10, %r11, %r12, %r13}}, %rd8, %rd8, %p2, 1, 1{transposes};
	wgmma.commit_group.sync.aligned;
	{wait}
	bar.sync 	0;
	st.shared.v4.b32 	[%r5], {{%r6, %r6, %r6, %r6}};
	st.global.b32 	[%rd3], %r13;
"""


BF16 = {"types": "k16.f32.bf16.bf16", "ones": 0x3F803F80, "transposes": ", 0, 0"}
FP8 = {"types": "k32.f32.e4m3.e4m3", "ones": 0x38383838, "transposes": ""}


def product(format_, fence=FENCE, wait="wgmma.wait_group.sync.aligned \t0;"):
    # 64 rows of 32 bytes of ones, in rows of 128 bytes: bytes that the threads did not write are NaN
    body = PRODUCT.format(fence=fence, wait=wait, **format_)
    body = body.replace("4611686293305294912", str(1 << 62 | 64 << 32 | 1 << 16 | 1024 >> 4))
    return run(body, torch.zeros(128), threads=128)


@pytest.mark.parametrize(("format_", "depth"), [(BF16, 16), (FP8, 32)])
def test_a_product(format_, depth):
    out = product(format_)
    warp = torch.arange(128) // 32
    assert torch.equal(out[warp == 0], torch.full((32,), float(depth)))  # rows 0 to 15: 2,048 bytes
    assert out[warp == 3].isnan().all()


@pytest.mark.parametrize("format_", [BF16, FP8])
def test_a_product_without_a_fence(format_):
    with pytest.raises(EmulationError, match="without fence"):
        product(format_, fence="")


@pytest.mark.parametrize("format_", [BF16, FP8])
def test_a_write_that_does_not_wait_for_a_product(format_):
    with pytest.raises(EmulationError, match="still reading"):
        product(format_, wait="")


@pytest.mark.parametrize("format_", [FP8 | {"transposes": ", 0, 0"}, BF16 | {"transposes": ""}])
def test_only_operands_of_16_bits_may_be_transposed(format_):
    with pytest.raises(AssertionError, match="those of FP8 may not"):
        product(format_)


FP8_PRODUCT = """
	mul.wide.u32 	%rd4, %r1, 16;
	add.s64 	%rd5, %rd1, %rd4;
	shl.b32 	%r3, %r1, 4;
	add.s32 	%r4, %r2, %r3;
	ld.global.v4.b32 	{{%r5, %r6, %r7, %r8}}, [%rd5];
	st.shared.v4.b32 	[%r4], {{%r5, %r6, %r7, %r8}};
	ld.global.v4.b32 	{{%r5, %r6, %r7, %r8}}, [%rd5+2048];
	st.shared.v4.b32 	[%r4+2048], {{%r5, %r6, %r7, %r8}};
	fence.proxy.async.shared::cta;
	bar.sync 	0;
	mov.b64 	%rd8, {a};
	mov.b64 	%rd9, {b};
	mov.b32 	%r10, 0f3F800000;
	mov.b32 	%r11, %r10;
	mov.b32 	%r12, %r10;
	mov.b32 	%r13, %r10;
	setp.eq.b32 	%p2, 0, 0;
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n8k32.f32.{types} {{%r10, %r11, %r12, %r13}}, %rd8, %rd9, %p2, 1, 1;
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned 	0;
	st.global.v4.b32 	[%rd5], {{%r10, %r11, %r12, %r13}};
"""


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("types", ["e4m3.e4m3", "e4m3.e5m2", "e5m2.e4m3", "e5m2.e5m2"])
def test_a_product_of_fp8(types, nan):
    dtypes = [{"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[t] for t in types.split(".")]
    torch.manual_seed(0)
    a, b = (torch.randn(rows, 32).to(dtype) for rows, dtype in zip((64, 8), dtypes, strict=True))
    if nan:
        a.view(torch.uint8)[17, 3] = 0x7F
    memory = torch.zeros(4096, dtype=torch.uint8)  # 8 rows of 16 bytes are one after the other
    memory[:2048] = a.view(torch.uint8).view(8, 8, 2, 16).transpose(1, 2).flatten()
    memory[2048:2304] = b.view(torch.uint8).view(8, 2, 16).transpose(0, 1).flatten()
    descriptors = (256 >> 4 << 32 | 128 >> 4 << 16 | at >> 4 for at in (1024, 3072))
    out = run(FP8_PRODUCT.format(types=types, **dict(zip("ab", descriptors, strict=True))), memory, threads=128)
    # a lane has two columns of two rows: of row r, and of row r + 8
    got = out.view(torch.float32)[:512].view(4, 8, 4, 2, 2).permute(0, 3, 1, 2, 4).reshape(64, 8)
    want = (a.double() @ b.double().T + 1).float()
    assert got.isnan().any() == nan
    assert torch.equal(got.nan_to_num(7e7), want.nan_to_num(7e7))


# ---- arithmetic


def test_rounding_to_bf16_is_that_of_torch():
    values = torch.tensor([0.0, -0.0, 1.0, 1.00390625, 1.01171875, 3.4e38, 1e-40, float("inf"), float("-inf")])
    values = torch.cat((values, torch.randn(1000), torch.randn(1000) * 1e-39))
    got = arithmetic.to_bf16(values.numpy())
    assert np.array_equal(got.view(np.int16), values.bfloat16().view(torch.int16).numpy())
    assert arithmetic.to_bf16(np.array([np.nan], np.float32)) == 0x7FFF


def elementwise(opcode, *operands):
    with np.errstate(all="ignore"):  # as a machine
        return arithmetic.ELEMENTWISE[opcode](*operands)


def halves(dtype):
    """All values of 16 bits, as a type says."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


FP8_TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("type_", FP8_TYPES)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_to_fp8_is_that_of_torch(type_, source):
    dtype = FP8_TYPES[type_]
    if source == torch.float32:
        numbers = torch.arange(0x7C, dtype=torch.uint8).view(dtype).float().unique()
        middles = (numbers[1:] + numbers[:-1]) / 2
        near = [middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(1e9))]
        values = torch.cat((*near, torch.randn(8192), torch.randn(8192) * 100, torch.randn(8192) * 1e-5))
        values = torch.cat((values, -values))
    else:
        values = halves(source).float()
    most = torch.finfo(dtype).max
    want = torch.where(values.isnan(), 0x7F, values.clamp(-most, most).to(dtype).view(torch.uint8)).numpy()
    cvt = arithmetic.ELEMENTWISE[f"cvt.rn.satfinite.{type_}x2.f32"]
    bits = values.numpy().view(np.uint32)
    assert np.array_equal(cvt(bits, bits[::-1]), want.astype(np.uint16) << 8 | want[::-1])
    if source == torch.float16:
        bits = halves(source).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        got = arithmetic.ELEMENTWISE[f"cvt.rn.satfinite.{type_}x2.f16x2"](bits << 16 | bits[::-1])
        assert np.array_equal(got, want.astype(np.uint16) << 8 | want[::-1])


@pytest.mark.parametrize("type_", FP8_TYPES)
def test_fp8_is_that_of_torch(type_):
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(FP8_TYPES[type_]).float().numpy()
    assert np.array_equal(arithmetic.FP8_VALUES[type_], want, equal_nan=True)
    pairs = codes.numpy().astype(np.uint16) << 8 | codes.numpy()[::-1]
    got = arithmetic.ELEMENTWISE[f"cvt.rn.f16x2.{type_}x2"](pairs)
    assert got.dtype == np.uint32
    high, low = ((got >> shift).astype(np.uint16).view(np.float16) for shift in (16, 0))
    assert np.array_equal(high, want, equal_nan=True)
    assert np.array_equal(low, want[::-1], equal_nan=True)


@pytest.mark.parametrize(("type_", "most"), [("e4m3", 0x7E), ("e5m2", 0x7B)])
def test_a_program_converts_to_fp8_and_back(type_, most):
    body = f"""
	cvt.rn.f32.u32 	%r3, %r1;
	mov.b32 	%r4, 0fFF800000;
	cvt.rn.satfinite.{type_}x2.f32 	%rs1, %r4, %r3;
	cvt.rn.f16x2.{type_}x2 	%r5, %rs1;
	mov.b32 	{{%rs2, %rs3}}, %r5;
	cvt.f32.f16 	%r6, %rs2;
	cvt.rn.satfinite.{type_}x2.f16x2 	%rs4, %r5;
	mov.b32 	%r7, {{%rs1, %rs4}};
	st.global.b32 	[%rd3], %r6;
	st.global.b32 	[%rd3+128], %r7;
"""
    numbers, pairs = run(body, torch.zeros(64)).view(2, 32)
    values = torch.arange(32.0).to(FP8_TYPES[type_])
    assert torch.equal(numbers, values.float())
    got = pairs.view(torch.uint8).view(32, 4)
    assert torch.equal(got[:, 0], values.view(torch.uint8))
    assert (got[:, 1] == most | 0x80).all()
    assert torch.equal(got[:, :2], got[:, 2:])


@pytest.mark.parametrize(
    ("opcode", "operands", "want"),
    [
        ("div.s32", (-7, 2), -3), ("rem.s32", (-7, 2), -1), ("shr.s32", (-8, 1), -4), ("shl.b32", (1, 32), 0),
        ("shr.u32", (-1, 33), 0), ("mul.hi.s32", (-(1 << 31), 4), -2), ("min.u32", (-1, 5), 5),
        ("min.s32", (-1, 5), -1), ("abs.s32", (-3,), 3), ("popc.b32", (255,), 8), ("clz.b32", (1,), 31),
        ("clz.b32", (0,), 32),
        ("prmt.b32", (0x33221100, 0x77665544, 0x7531), 0x77553311), ("prmt.b32", (0x1180, 0, 0x1098), 0x118000FF),
        ("prmt.b32", (0, 0x7F800000, 0x56EF), 0x0080FF00), ("lop3.b32", (0xC, 0xA, 0x9, 0x80), 8),
        ("lop3.b32", (0xF0, 0xCC, 0xAA, 0xE8), 0xE8), ("lop3.b32", (0xF0, 0xCC, 0xAA, 0x1B), ~0xFF | 0x1B),
        ("shf.l.wrap.b32", (-(1 << 31), 1, 1), 3), ("shf.l.wrap.b32", (5, 7, 32), 7),
        ("shf.l.clamp.b32", (5, 7, 33), 5), ("shf.r.wrap.b32", (2, 1, 1), -(1 << 31) | 1),
        ("shf.r.clamp.b32", (5, 7, 99), 7), ("shf.r.wrap.b32", (5, 7, 64), 5),
        ("bfe.u32", (0x12345678, 8, 8), 0x56), ("bfe.u32", (-1, 28, 8), 15), ("bfe.u32", (-1, 32, 8), 0),
        ("bfe.u32", (-1, 0, 32), -1), ("bfe.u32", (-1, 3, 0), 0), ("bfe.s32", (0xF0, 4, 4), -1),
        ("bfe.s32", (0x70, 4, 4), 7), ("bfe.s32", (-(1 << 31), 30, 8), -2), ("bfe.s32", (-1, 40, 3), -1),
        ("bfe.s32", (-1, 3, 0), 0), ("bfi.b32", (0xAB, 0x11111111, 8, 8), 0x1111AB11),
        ("bfi.b32", (-1, 0, 28, 8), -(1 << 28)), ("bfi.b32", (-1, 7, 32, 8), 7), ("bfi.b32", (5, 7, 0, 40), 5),
    ],
)  # fmt: skip
def test_integers(opcode, operands, want):
    got = arithmetic.ELEMENTWISE[opcode](*(np.array([o], np.int64).astype(np.uint32) for o in operands))
    assert got.dtype == np.uint32
    assert got.view(np.int32) == want


@pytest.mark.parametrize(
    ("opcode", "operands", "want"),
    [
        ("bfe.u64", (0x123456789ABCDEF0, 60, 8), 1), ("bfe.u64", (-1, 8, 40), (1 << 40) - 1),
        ("bfe.s64", (0xF0, 4, 4), -1), ("bfe.s64", (-1, 0, 64), -1),
        ("bfi.b64", (0xABCD, 0, 40, 16), 0xABCD << 40), ("bfi.b64", (-1, 0, 0, 64), -1),
    ],
)  # fmt: skip
def test_fields_of_64_bits(opcode, operands, want):
    first = 1 if opcode.startswith("bfe") else 2
    dtypes = [np.uint64 if i < first else np.uint32 for i in range(len(operands))]
    values = [np.array([o & (1 << 64) - 1], np.uint64).astype(t) for o, t in zip(operands, dtypes, strict=True)]
    got = arithmetic.ELEMENTWISE[opcode](*values)
    assert got.dtype == np.uint64
    assert got.view(np.int64) == want


def test_a_program_with_instructions_on_bits():
    body = """
	mov.b32 	%r3, 0x44332211;
	prmt.b32 	%r4, %r3, %r1, 0x4012U;
	lop3.b32 	%r5, %r4, %r1, 255, 0x78;
	bfe.u32 	%r6, %r5, 8, 8;
	bfi.b32 	%r7, %r6, %r1, 16, 8;
	shf.l.wrap.b32 	%r8, %r7, %r7, 8;
	cvt.u16.u8 	%rs1, %rs1;
	cvt.u32.u8 	%r9, %r4;
	cvt.s32.s8 	%r10, %r4;
	add.s32 	%r11, %r9, %r10;
	sub.s32 	%r12, %r11, 102;
	add.s32 	%r13, %r8, %r12;
	st.global.b32 	[%rd3], %r13;
"""
    # bytes: 0x33, 0x22, 0x11, lane; the xor with lane & 255 changes the lowest only; 0x22 is put above the lane
    assert run(body, ints(32)).tolist() == [0x22000000 | lane << 8 for lane in range(32)]


ONE = torch.ones((), dtype=torch.float64)
BF16_BINARY = {
    "add": torch.add, "sub": torch.sub, "mul.rn": torch.mul, "max": torch.fmax, "min": torch.fmin,
    "max.NaN": torch.maximum, "min.NaN": torch.minimum,
    "max.xorsign.abs": lambda a, b: torch.fmax(a.abs(), b.abs()) * ONE.copysign(a) * ONE.copysign(b),
    "max.NaN.xorsign.abs": lambda a, b: torch.maximum(a.abs(), b.abs()) * ONE.copysign(a) * ONE.copysign(b),
}  # fmt: skip


@pytest.mark.parametrize("name", BF16_BINARY)
def test_arithmetic_of_bf16(name):
    torch.manual_seed(0)
    a = halves(torch.bfloat16)
    for b in (a[torch.randperm(len(a))], (a.float() * (1 + torch.randn(len(a)))).bfloat16()):
        want = BF16_BINARY[name](a.double(), b.double())
        one, two = (t.view(torch.int16).numpy().view(np.uint32) for t in (a, b))
        got = torch.from_numpy(elementwise(name + ".bf16x2", one, two).view(np.int16))
        assert (got[want.isnan()] == 0x7FFF).all()
        # torch rounds to bf16 by way of fp32
        exact = want.float().double() == want
        assert torch.equal(got.view(torch.bfloat16)[exact].double(), want.bfloat16()[exact].double())
        near = (got.view(torch.bfloat16).double() - want).abs() <= (want.abs() / 256).clamp(min=2.0**-134)
        assert (near | want.isnan() | (want.abs() > 3e38)).all()


@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("dtype", [np.int16, np.uint16])
def test_extremes_of_pairs_of_integers(name, dtype):
    random = np.random.default_rng(0)
    a, b = (random.integers(0, 1 << 32, 1000, dtype=np.uint32) for _ in range(2))
    got = elementwise(f"{name}.{'s' if dtype is np.int16 else 'u'}16x2", a, b)
    wanted = np.where((a.view(dtype) < b.view(dtype)) == (name == "min"), a.view(dtype), b.view(dtype))
    assert np.array_equal(got.view(dtype), wanted)


@pytest.mark.parametrize(("name", "function"), [("add", torch.add), ("sub", torch.sub)])
def test_arithmetic_of_fp16(name, function):
    a = halves(torch.float16)
    b = a[torch.randperm(len(a), generator=torch.Generator().manual_seed(0))]
    one, two = (t.view(torch.int16).numpy().view(np.uint32) for t in (a, b))
    got = torch.from_numpy(elementwise(f"{name}.f16x2", one, two).view(np.int16))
    want = function(a.double(), b.double()).half()  # the sum of two fp16 numbers is exact in fp64
    assert (got[want.isnan()] == 0x7FFF).all()
    assert torch.equal(got[~want.isnan()], want.view(torch.int16)[~want.isnan()])


def test_signs_of_bf16():
    a = halves(torch.bfloat16).view(torch.int16).numpy().view(np.uint32)
    assert np.array_equal(arithmetic.ELEMENTWISE["abs.bf16x2"](a), a & 0x7FFF7FFF)
    assert np.array_equal(arithmetic.ELEMENTWISE["neg.bf16x2"](a), a ^ 0x80008000)


@pytest.mark.parametrize(
    ("a", "b", "c", "want"),
    [
        (2.0, 3.0, 1.0, 7.0), (1.0, 1.00390625, 0.0, 1.0), (float("inf"), 0.0, 1.0, float("nan")),
        # the product is in the middle of two numbers: what is added decides, however small it is
        (1.0625, 1.0625, 0.0, 1.125), (1.0625, 1.0625, 2.0**-100, 1.1328125), (1.0625, 1.0625, -(2.0**-100), 1.125),
        (-1.0625, 1.0625, -(2.0**-100), -1.1328125), (3e38, 3e38, 0.0, float("inf")), (2.0**-70, 2.0**-70, 0.0, 0.0),
    ],
)  # fmt: skip
def test_a_fused_multiply_add_of_bf16_rounds_once(a, b, c, want):
    operands = [torch.tensor([v, v]).bfloat16().view(torch.int16).numpy().view(np.uint32) for v in (a, b, c)]
    got = torch.from_numpy(elementwise("fma.rn.bf16x2", *operands).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(got.float().nan_to_num(7.0), torch.tensor([want, want]).nan_to_num(7.0))


@pytest.mark.parametrize(
    ("opcode", "a", "b", "want"),
    [
        ("max", 0.0, -0.0, 0.0), ("max", -0.0, 0.0, 0.0), ("min", 0.0, -0.0, -0.0), ("min", -0.0, 0.0, -0.0),
        ("max", np.nan, 1.0, 1.0), ("max.NaN", np.nan, 1.0, np.nan), ("max", -np.nan, -np.nan, np.nan),
        ("min.NaN", 2.0, -np.nan, np.nan), ("max.xorsign.abs", -3.0, 2.0, -3.0), ("max.xorsign.abs", -3.0, -2.0, 3.0),
        ("min.xorsign.abs", -3.0, 2.0, -2.0), ("max.NaN.xorsign.abs", -3.0, np.nan, np.nan),
        ("div.rn", 1.0, 3.0, 1 / 3), ("div.rn", 1.0, 0.0, np.inf),
    ],
)  # fmt: skip
def test_numbers(opcode, a, b, want):
    got = elementwise(opcode + ".f32", *(np.array([v], np.float32).view(np.uint32) for v in (a, b)))
    assert got == (0x7FFFFFFF if np.isnan(want) else np.array([want], np.float32).view(np.uint32))


@pytest.mark.parametrize(("name", "want"), [("eq", False), ("ne", False), ("lt", False), ("ltu", True), ("nan", True)])
def test_comparisons_with_nan(name, want):
    one, nan = (np.array([v], np.float32).view(np.uint32) for v in (1, np.nan))
    assert arithmetic.ELEMENTWISE[f"setp.{name}.f32"](one, nan) == want


# ---- tensors in memory


def test_a_descriptor_says_what_the_host_code_wrote():
    tensor = torch.zeros(10, 24)
    found = TensorMap.decode(descriptor(tensor, (4, 8)))
    assert (found.address, found.shape, found.box) == (tensor.data_ptr(), (24, 10), (8, 4))
    assert (found.strides, found.swizzle, found.size) == ((4, 96), 0, 128)


@pytest.mark.parametrize(
    ("dtype", "box", "swizzle"),
    [
        (torch.uint8, (64, 128), 128), (torch.uint8, (64, 64), 64), (torch.float8_e4m3fn, (64, 32), 32),
        (torch.float8_e5m2, (64, 128), 0), (torch.float32, (1, 128), 0), (torch.float32, (64, 32), 128),
        (torch.float32, (8, 8), 32), (torch.int32, (1, 4), 0), (torch.bfloat16, (8, 64), 128),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at", [(0, 0), (3, 5), (-1, -3), (65, 179), (0, 192), (-64, 0)])
def test_boxes_of_each_element_and_swizzle(dtype, box, swizzle, at):
    (height, width), (y, x) = box, at
    source = torch.randint(1, 100, (70, 192)).to(dtype)
    padded = torch.zeros(70 + 2 * 64, 192 + 2 * 192, dtype=dtype)
    padded.view(torch.uint8)[64:134, 192 * dtype.itemsize :][:, : 192 * dtype.itemsize] = source.view(torch.uint8)
    memory, shared = Machine().memory, Shared(16384)
    memory.add(source)
    tensor_map = TensorMap.decode(descriptor(source, box, swizzle))
    granules = tensor_map.granules(2048)
    shared.granules[granules] = tensor_map.load(memory, (x, y))
    want = padded[64 + y :, 192 + x :][:height, :width].contiguous().view(torch.uint8).numpy()
    row, byte = np.indices(want.shape)
    place = row * want.shape[1] + byte  # with a swizzle: rows of 128, 64 or 32 bytes
    place ^= (place // 128 % max(swizzle // 16, 1)) * 16
    assert np.array_equal(shared.bytes[2048 + place], want)
    target = torch.full((70, 192), 7).to(dtype)
    copy = target.clone()
    memory.add(target)
    TensorMap.decode(descriptor(target, box, swizzle)).store(memory, (x, y), shared.granules[granules])
    rows, columns = (slice(max(i, 0), max(i + n, 0)) for i, n in ((y, height), (x, width)))
    copy[rows, columns] = source[rows, columns]
    assert torch.equal(target.view(torch.uint8), copy.view(torch.uint8))


def test_two_copies_to_the_same_place():
    shared = Shared(4096)
    shared.begin_write(np.arange(4))
    with pytest.raises(AccessError, match="two asynchronous copies"):
        shared.begin_write(np.arange(3, 6))


def test_unknown_instructions_are_named():
    with pytest.raises(NotImplementedError, match=re.escape("no instruction brev.b32")):
        run("brev.b32 \t%r3, %r1;", ints(32))
