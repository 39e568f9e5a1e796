"""Ranks on a CPU that run the rules of Hopper which compute while tokens travel, and the engine "symmetric".

Stand-ins are in place of the kernels. They have row tiles of four rows, so that a few tokens have tiles of every kind.
For "symmetric", processes share the memory of files.
"""

import contextlib
import os
import time
from collections import Counter
from typing import ClassVar
from unittest import mock

import torch
from torch import distributed as dist

import fusedmoe as fm
from fusedmoe.expert_parallel import symmetric
from fusedmoe.kernels.exchange import functions
from fusedmoe.kernels.exchange.layout import BEGIN, CONTROL_BYTES, CONTROL_WORDS, COPY_WARPS, DONE, NUMBER, READY, TELL
from fusedmoe.kernels.rows.move import functions as row_functions
from fusedmoe.ops.exchange.fixed import sum_over_ranks

BF16 = torch.bfloat16
HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN = 32, 16, 4, 2
MOST = 50

# each with the rules that it is compared with, which cost less for so few tokens
OVERLAPS = {
    "sm90.gemm_activation_of_arriving_tokens": ("sm90.gathered_gemm_activation", "sm90.grouped_gemm_activation"),
    "sm90.gemm_of_leaving_rows": ("sm90.grouped_gemm",),
    "sm90.dgrad_activation_of_arriving_gradients": (
        "sm90.gathered_dgrad_activation",
        "sm90.grouped_dgrad_activation",
    ),
    "sm90.wgrad_beside_exchange": ("sm90.grouped_dgrad",),
}
OTHERS = {other for others in OVERLAPS.values() for other in others}
# the same under "fp8_block", where products follow no arriving rows in bf16
FP8_OVERLAPS = {
    "sm90.fp8_gemm_of_leaving_rows": ("sm90.fp8_grouped_gemm",),
    "sm90.fp8_wgrad_beside_exchange": ("sm90.fp8_grouped_dgrad",),
}
ARRIVING_CODES = "sm90.fp8_gemm_activation_of_arriving_tokens"
ARRIVING_GRADIENTS = "sm90.fp8_dgrad_activation_of_arriving_gradients"
GRADIENTS_AS_CODES = "sm90.gather_gradients_as_codes"
"""The same, if tokens and gradients travel as FP8 codes."""
FP8_OTHERS = {other for others in FP8_OVERLAPS.values() for other in others}
APART = "sm90.activation,sm90.dactivation"
"""Off in the ranks: for so few tokens they cost less too, and round other values."""


def stand_ins():
    """Let this process, a rank, have an sm_90 GPU whose kernels are the stand-ins."""
    from fusedmoe.fusion.program import plan_table
    from fusedmoe.kernels.build import toolkit
    from kit import sm90_stand_ins

    plan_table.arch_of = lambda device: 90
    sm90_stand_ins.install(router=True)
    toolkit.missing_packages = lambda: ()
    os.environ["FUSEDMOE_DISABLE"] = APART
    return sm90_stand_ins


def layer(ep, main_grad=False, hidden=HIDDEN, intermediate=INTERMEDIATE):
    torch.manual_seed(0)
    made = fm.MoE(hidden, intermediate, EXPERTS, CHOSEN, dtype=BF16, expert_parallel=ep)
    here = EXPERTS // ep.ranks
    for op in (made.experts.gate_up, made.experts.down):
        weight = torch.randn(EXPERTS, *op.weight.shape[1:], generator=torch.Generator().manual_seed(op.in_features))
        op.weight.data.copy_(0.2 * weight[ep.rank * here : (ep.rank + 1) * here])
        op.accumulate_into_main_grad = main_grad
        if main_grad:
            op.weight.main_grad = torch.ones(op.weight.shape)
    return made


def trained(made, count, training=True, weights=None):
    """Output and gradients, by name. ``weights``: the dtype of routing weights of the caller; None for the router's."""
    generator = torch.Generator().manual_seed(made.expert_parallel.rank + 1)
    x, dy = (torch.randn(count, made.hidden, generator=generator).to(BF16) for _ in range(2))
    x.requires_grad_(training)
    weight = None
    with torch.set_grad_enabled(training):
        if weights is None:
            y = made(x)
        else:
            probs, index = torch.randn(count, EXPERTS, generator=generator).softmax(-1).topk(CHOSEN)
            weight = probs.to(weights).requires_grad_(training)
            y = made.experts(x, expert_index=index, expert_weight=weight)
    found = {"y": y.detach()}
    if training:
        y.backward(dy)
        found |= {} if weight is None else {"expert_weight": weight.grad}
        found |= {"x": x.grad} | {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
        for name, p in made.named_parameters():
            if hasattr(p, "main_grad"):
                found[name] = p.main_grad
    return found


def rules_of(made, count=1, training=True):
    """The rules of a plan that compute while tokens travel."""
    x = torch.zeros(max(count, 1), made.hidden, dtype=BF16, requires_grad=training)
    with torch.set_grad_enabled(training):
        return {step.rule for step in made.explain(x).steps} & {
            *OVERLAPS,
            *FP8_OVERLAPS,
            ARRIVING_CODES,
            ARRIVING_GRADIENTS,
            GRADIENTS_AS_CODES,
        }


# ---- "symmetric" ----------------------------------------------------------------------------------------------------


class FileBuffer:
    """The interface of `SymmetricBuffer`, in files that all processes map."""

    made: ClassVar = Counter()  # by group
    of_control: ClassVar = {}  # the last buffers, by the address of their control

    def __init__(self, nbytes, group, device):
        self.nbytes, self.group = nbytes, group
        name = f"{FileBuffer.folder}/{group.group_name}buffer{FileBuffer.made[group.group_name]}of"
        FileBuffer.made[group.group_name] += 1
        with open(f"{name}{group.rank()}", "wb") as file:
            file.truncate(nbytes)
        dist.barrier(group)
        sizes = {"shared": True, "size": nbytes, "dtype": torch.uint8}
        self.memory = [torch.from_file(f"{name}{r}", **sizes) for r in range(group.size())]
        FileBuffer.of_control[self.memory[group.rank()].data_ptr()] = self

    def of_rank(self, rank, offset, shape, dtype):
        count = torch.Size(shape).numel() * dtype.itemsize
        return self.memory[rank][offset : offset + count].view(dtype).view(shape)


class Exchange:
    """The current exchange of a region; the ranks use its control words as the kernels do."""

    def __init__(self, region):
        self.buffer, self.rank, self.ranks = (
            FileBuffer.of_control[region.control.data_ptr()],
            region.rank,
            len(region[0]),
        )
        self.control = [self.buffer.of_rank(r, 0, (CONTROL_WORDS,), torch.int32) for r in range(self.ranks)]
        self.number = int(self.control[self.rank][NUMBER]) + 1

    def begin(self):
        """Wait until all ranks have completed the exchange before; then their data are poison."""
        for rank in range(self.ranks):
            self._wait(DONE + rank, self.number - 1)

    def tell(self, word, ranks=None):
        for rank in range(self.ranks) if ranks is None else ranks:
            self.control[rank][word + self.rank] = self.number

    def wait(self, rank):
        self._wait(READY + rank, self.number)

    def end(self):
        self.control[self.rank][NUMBER] = self.number
        self.tell(DONE)

    def at(self, rank, place, shape, dtype):
        return self.buffer.of_rank(rank, place, shape, dtype)

    def _wait(self, word, number):
        end = time.monotonic() + 60
        while self.control[self.rank][word] < number:
            time.sleep(1e-4)
            assert time.monotonic() < end, "a rank does not come"


def bind_signal(region):
    def run(region, phase):
        exchange = Exchange(region)
        if phase == BEGIN:
            exchange.begin()
        elif phase == TELL:
            exchange.tell(READY)
            for rank in range(exchange.ranks):
                exchange.wait(rank)
        else:
            exchange.end()

    return run


def bind_send(x, index, weight, ranks, rows, here, scale=None):
    kernels_ran["send" if scale is None else "send codes"] += 1

    def run(region, x, index=None, weight=None, scale=None):
        exchange, rank = Exchange(region), region.rank
        if scale is not None:
            x = functions.pack(x, scale)
        chosen = 0 if index is None else index.shape[1]
        sizes = [] if index is None else [4 * rows * chosen, weight.itemsize * rows * chosen]
        *of_ids, at_rows = functions.places([*sizes, 0])[0]
        exchange.begin()
        exchange.at(rank, at_rows, x.shape, x.dtype).copy_(x)
        out = x.new_full((ranks * rows, x.shape[1]), 0xFF if x.dtype is torch.uint8 else torch.nan)
        out[rank * rows :][: len(x)] = x
        if index is None:
            exchange.tell(READY)
            return out, None, None
        ids = torch.full((rows, chosen), -1, dtype=torch.int32)
        ids[: len(x)] = torch.where((index >= 0) & (index < ranks * here), index, -1)
        shape = rows, chosen
        exchange.at(rank, of_ids[0], shape, torch.int32).copy_(ids)
        exchange.at(rank, of_ids[1], shape, weight.dtype)[: len(x)] = weight
        exchange.tell(READY)
        for r in range(ranks):
            exchange.wait(r)
        every = [
            [exchange.at(r, at, shape, d) for r in range(ranks)]
            for at, d in zip(of_ids, (torch.int32, weight.dtype), strict=True)
        ]
        ids, weights = map(torch.cat, every)
        return out, ids - rank * here, weights

    return run


def bind_pull(like, every, chosen, here, at_rows, sms):
    def run(region, rows, ids, words=None, block=0):
        exchange, rank, each = Exchange(region), region.rank, len(rows) // len(region.peers)
        ranks = exchange.ranks
        for source in range(ranks):
            if source != rank:
                exchange.wait(source)
        rank_of = torch.arange(len(rows)) // each
        first = torch.where((ids >= 0) & (ids < here), ids, here).amin(1)
        step_of = first // block if block else (rank_of - rank) % ranks
        step_of[(first == here) | (rank_of == rank)] = -1
        for step in range(-(-here // block)) if block else range(1, ranks):
            for row in (step_of == step).nonzero().flatten().tolist():
                source = row // each
                rows[row] = exchange.at(source, at_rows, (each, rows.shape[1]), rows.dtype)[row - source * each]
            if words is not None:
                assert words[step, -1] == -sms * COPY_WARPS
                words[step, -1] = 0
        if block:
            kernels_ran["pull by experts"] += 1
        exchange.end()

    return run


def bind_push(sums, row_of_slot, values, at_parts, at_values, sms):
    from kit.sm90_stand_ins import bind_slot_values

    def run(region, sums, values, row_of_slot, begin, end):
        exchange, rank, (every, chosen) = Exchange(region), region.rank, row_of_slot.shape
        each = every // exchange.ranks
        exchange.begin()
        for step in range(begin, end):
            to = (rank - step) % exchange.ranks
            there = slice(to * each, (to + 1) * each)
            if step:
                shape = exchange.ranks, each, sums.shape[1]
                exchange.at(to, at_parts, shape, sums.dtype)[rank] = sums[there]
            if values is not None:
                shape, slots = (exchange.ranks, each, chosen), row_of_slot[there]
                exchange.at(to, at_values, shape, values.dtype)[rank] = bind_slot_values(values, slots)(values, slots)
            exchange.tell(READY, [to])

    return run


def bind_push_sums(rows, row_of_slot, values, at_parts, at_values, sms, tiles=None, experts=0, half=0):
    from kit.row_ranges import tiles_of
    from kit.sm90_stand_ins import bind_sum_slots

    def run(region, rows, row_of_slot, values=None, blocks=None):
        kernels_ran["push sums" if tiles is None else "push sums beside their product"] += 1
        assert (blocks is None) == (tiles is None)
        ranks = len(region.peers)
        if tiles is not None:
            tile_m, column_tiles = tiles
            lines = -(-experts // row_functions.experts_of_block(experts, halves=half > 0)) if experts else ranks
            blocks = blocks.view(2 * lines if half else lines, -1)
            kernels_ran["push sums by experts"] += bool(experts)
            kernels_ran["push sums in halves"] += bool(half)
            assert torch.equal(blocks[:, -2], 2 * column_tiles * tiles_of(blocks, tile_m).to(torch.int32))
        each, sums = len(row_of_slot) // ranks, rows.new_full((len(row_of_slot), rows.shape[1]), torch.nan)
        for rank in {*range(ranks)} - {region.rank}:
            there = slice(rank * each, (rank + 1) * each)
            sums[there] = bind_sum_slots(rows, row_of_slot[there], None)(rows, row_of_slot[there], None)
        push = bind_push(sums, row_of_slot, values, at_parts, at_values, sms)
        push(region, sums, values, row_of_slot, 0 if values is not None else 1, ranks)

    return run


def bind_total(rows, tokens, chosen, values, count, at_parts, at_values):
    from kit.sm90_stand_ins import bind_sum_slots

    def run(region, rows, row_of_slot):
        exchange = Exchange(region)
        for rank in range(exchange.ranks):
            if rank != region.rank:
                exchange.wait(rank)
        parts = exchange.at(region.rank, at_parts, (exchange.ranks, count, rows.shape[1]), rows.dtype)
        parts[region.rank] = bind_sum_slots(rows, row_of_slot, None)(rows, row_of_slot, None)
        y, of_values = sum_over_ranks(parts, tokens).clone(), None
        if values is not None:
            given = exchange.at(region.rank, at_values, (exchange.ranks, count, chosen), values)
            of_values = sum_over_ranks(given, tokens).clone()
        exchange.end()
        return y, of_values

    return run


kernels_ran = Counter()
KERNELS = {f.__name__: f for f in (bind_signal, bind_send, bind_pull, bind_push, bind_push_sums, bind_total)}


@contextlib.contextmanager
def on_cpus(folder):
    """Let ``"symmetric"`` run on CPUs; the data that an exchange gets were NaN before it."""
    FileBuffer.folder = folder
    channel_of = symmetric.Symmetric.channel

    def poisoned(self, nbytes, device, returns=False):
        channel = channel_of(self, nbytes, device, returns)
        Exchange(channel.region).begin()  # the others read the last data no more
        channel.buffer.memory[self.rank][CONTROL_BYTES:].fill_(0xFF)
        dist.barrier(self.group)  # none of them has begun to write
        return channel

    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (symmetric, "why_not", lambda: None),
            (symmetric, "SymmetricBuffer", FileBuffer),
            (symmetric, "current_stream", lambda device: 0),
            (symmetric.torch.cuda, "synchronize", lambda device: None),
            (symmetric.torch.cuda, "current_device", lambda: 0),
            (symmetric.torch.cuda, "is_current_stream_capturing", lambda: False),
            (functions, "arch_of", lambda device: 90),
            (functions.toolkit, "missing_packages", lambda: ()),
            (functions.toolkit, "why_unusable", lambda: None),
            (symmetric.Symmetric, "channel", poisoned),
            *((functions, name, function) for name, function in KERNELS.items()),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield
