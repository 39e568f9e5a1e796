"""The emulator finds the mistakes that it is there for: small programs in PTX, right and wrong."""

import struct

import pytest
import torch
from emulator import ptx
from emulator.barriers import EmulationError
from emulator.machine import Launch, Machine
from emulator.memory import AccessError

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


def descriptor(tensor, box):
    """The descriptor of copies of boxes of a matrix of 4 bytes per element."""
    (rows, columns), (height, width) = tensor.shape, box
    words = [0] * 16
    words[0] = tensor.data_ptr()
    words[1] = 1 << 4 | 7 << 7 | tensor.stride(0) * 4 >> 4 << 32
    words[4] = columns - 1 | rows - 1 << 32
    words[6], words[7] = width - 1 << 56, height - 1
    return struct.pack("<16Q", *words)


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


# ---- memory


@pytest.mark.parametrize(
    ("body", "count", "message"),
    [
        ("st.global.b32 \t[%rd3], %r1;", 31, r"warp 0, line \d+, st.global.b32: .* is not of one tensor"),
        ("st.shared.b32 \t[%r2+8192], %r1;", 32, "of 0x2400 bytes"),
        ("add.s32 \t%r3, %r2, 2;\n\tst.shared.b32 \t[%r3], %r1;", 32, "not a multiple of 4"),
        ("mbarrier.arrive.shared.b64 \t%rd9, [%r2];", 32, "no mbarrier was initialized"),
        ("st.shared.v4.b32 \t[%r2+8], {%r1, %r1, %r1, %r1};", 32, "a vector is not aligned"),
        ("red.relaxed.gpu.global.add.v4.f32 \t[%rd1+8], {%r1, %r1, %r1, %r1};", 32, "a vector is not aligned"),
        (
            "setp.gt.s32 \t%p1, %r1, 30;\n\tvote.sync.any.pred \t%p1, %p1, -1;\n\t@%p1 bra \t$L_trap;\n"
            "\tbra.uni \t$L_end;\n$L_trap:\n\ttrap;\n$L_end:",
            32,
            "the kernel ends with an error",
        ),
        ("brev.b32 \t%r3, %r1;", 32, "no instruction brev.b32"),
    ],
)
def test_accesses_that_are_errors(body, count, message):
    with pytest.raises((EmulationError, NotImplementedError), match=message):
        run(body, ints(count))


def test_shared_memory_that_was_not_written_is_nan():
    out = run("ld.shared.b32 \t%r3, [%r2];\n\tst.global.b32 \t[%rd3], %r3;", ints(32))
    assert out.view(torch.float32).isnan().all()


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
    with pytest.raises(EmulationError, match=r"no warp can go on:\nCTA \(0, 0, 0\), warp 0: lanes 0xffffffff at line"):
        run(body.replace("bar.arrive \t2", "bar.arrive \t3"), ints(64), threads=64)


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


@pytest.mark.parametrize(("x", "y", "eagerness"), [(-4, -2, 0.0), (16, 3, 1.0), (40, 0, 0.3)])
def test_a_copy_of_a_box_has_zeros_outside_of_the_tensor(x, y, eagerness):
    source = torch.arange(5 * 20, dtype=torch.float32).view(5, 20) + 1
    out = torch.zeros(64)
    body, of_source = LOAD.format(x=x, y=y, wait=WAIT), descriptor(source, (8, 8))
    run(body, out, descriptor=of_source, memory=[source], eagerness=eagerness)
    padded = torch.zeros(40, 80)
    padded[10:15, 10:30] = source
    assert torch.equal(out.view(8, 8), padded[10 + y : 18 + y, 10 + x : 18 + x])


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


@pytest.mark.parametrize("eagerness", [0.0, 1.0])
def test_a_store_of_a_box_ends_with_the_tensor(eagerness):
    target, out = torch.zeros(6, 8, dtype=torch.int32), ints(32)
    body = STORE.format(fence=FENCE, wait=WAIT_READ)
    run(body, out, descriptor=descriptor(target, (8, 8)), memory=[target], eagerness=eagerness)
    want = torch.zeros_like(target)
    want[1:, 2:] = torch.arange(32).repeat(2).view(8, 8)[:5, :6]
    assert torch.equal(target, want)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (LOAD.format(x=0, y=0, wait=""), "a copy is still writing"),
        (STORE.format(fence="", wait=WAIT_READ), "without fence"),
        (STORE.format(fence=FENCE, wait=""), "still reading"),
    ],
    ids=["read without a wait", "store without a fence", "write without a wait"],
)
def test_races_with_a_copy(body, message):
    tensor = torch.ones(8, 8)
    with pytest.raises(EmulationError, match=message):
        run(body, torch.zeros(64), descriptor=descriptor(tensor, (8, 8)), memory=[tensor], eagerness=0.0)


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
@pytest.mark.parametrize(("wrong", "message"), [({"fence": ""}, "without fence"), ({"wait": ""}, "still reading")])
def test_races_with_a_product(format_, wrong, message):
    with pytest.raises(EmulationError, match=message):
        product(format_, **wrong)


def test_a_box_that_leaves_the_memory_of_the_tensor():
    target = torch.zeros(8, 8)
    larger = bytearray(descriptor(target, (8, 8)))
    larger[36:40] = struct.pack("<I", 11)  # claims 12 rows
    with pytest.raises(AccessError, match="is not of one tensor"):
        run(STORE.format(fence=FENCE, wait=WAIT_READ), ints(32), descriptor=bytes(larger), memory=[target])


def test_a_launch_beside_another_one():
    """It begins when all CTAs let it, and may end only after the other one."""

    def begun(body, before=None):
        (program,) = ptx.parse(PROGRAM.format(body=body, threads=32))
        machine, out = Machine(), ints(32)
        machine.memory.add(out)
        arguments = (bytes(128), struct.pack("<Q", out.data_ptr()))
        return machine, machine.rounds(Launch(program, (2, 1, 1), (32, 1, 1), (1, 1, 1), 8192, arguments), before), out

    body = "\tst.global.b32 [%rd3], %r1;\n"
    for wait in ("\tgriddepcontrol.wait;\n", ""):
        first, rounds, of_first = begun("\tgriddepcontrol.launch_dependents;\n\tbar.sync 0;\n" + body)
        next(rounds)
        assert first.lets_next_begin
        _, second, of_second = begun(body + wait, first)
        if not wait:
            with pytest.raises(EmulationError, match="ends before it"):
                list(second)
            break
        for _ in range(5):
            next(second)
        list(rounds)
        list(second)
        assert of_first.tolist() == of_second.tolist() == [*range(32)]
