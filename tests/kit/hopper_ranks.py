"""Ranks on a CPU that run the rules of Hopper which compute while tokens travel, and the engine "symmetric".

Stand-ins are in place of the kernels. They have row tiles of four rows, so that a few tokens have tiles of every kind.
For "symmetric", processes share the memory of files, and the device's streams do nothing.
"""

import contextlib
import os
from collections import Counter
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import torch
from torch import distributed as dist

import fusedmoe as fm
from fusedmoe.expert_parallel import symmetric

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


def layer(ep, main_grad=False):
    torch.manual_seed(0)
    made = fm.MoE(HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN, dtype=BF16, expert_parallel=ep)
    here = EXPERTS // ep.ranks
    for op in (made.experts.gate_up, made.experts.down):
        weight = torch.randn(EXPERTS, *op.weight.shape[1:], generator=torch.Generator().manual_seed(op.in_features))
        op.weight.data.copy_(0.2 * weight[ep.rank * here : (ep.rank + 1) * here])
        op.accumulate_into_main_grad = main_grad
        if main_grad:
            op.weight.main_grad = torch.ones(op.weight.shape)
    return made


def trained(made, count, training=True):
    """Output and gradients, by name."""
    generator = torch.Generator().manual_seed(made.expert_parallel.rank + 1)
    x, dy = (torch.randn(count, HIDDEN, generator=generator).to(BF16) for _ in range(2))
    x.requires_grad_(training)
    with torch.set_grad_enabled(training):
        y = made(x)
    found = {"y": y.detach()}
    if training:
        y.backward(dy)
        found |= {"x": x.grad} | {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
        for name, p in made.named_parameters():
            if hasattr(p, "main_grad"):
                found[name] = p.main_grad
    return found


def rules_of(made, count=1, training=True):
    """The rules of a plan that compute while tokens travel."""
    x = torch.zeros(max(count, 1), HIDDEN, dtype=BF16, requires_grad=training)
    with torch.set_grad_enabled(training):
        return {step.rule for step in made.explain(x).steps} & OVERLAPS.keys()


# ---- "symmetric" ----------------------------------------------------------------------------------------------------


class FileBuffer:
    """The interface of `SymmetricBuffer`, in files that all processes map."""

    made: ClassVar = Counter()  # by group

    def __init__(self, nbytes, group, device):
        self.nbytes, self.group = nbytes, group
        name = f"{FileBuffer.folder}/{group.group_name}buffer{FileBuffer.made[group.group_name]}of"
        FileBuffer.made[group.group_name] += 1
        with open(f"{name}{group.rank()}", "wb") as file:
            file.truncate(nbytes)
        dist.barrier(group)
        sizes = {"shared": True, "size": nbytes, "dtype": torch.uint8}
        self.memory = [torch.from_file(f"{name}{r}", **sizes) for r in range(group.size())]

    def of_rank(self, rank, offset, shape, dtype):
        count = torch.Size(shape).numel() * dtype.itemsize
        return self.memory[rank][offset : offset + count].view(dtype).view(shape)

    def barrier(self, timeout_s):
        dist.barrier(self.group)


class Stream:
    """Work is done when it is launched."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, other):
        pass

    def record_event(self):
        return SimpleNamespace(wait=lambda: None)


class Torch:
    """torch, with a stand-in for its streams."""

    cuda = SimpleNamespace(
        Stream=Stream, current_stream=Stream, stream=lambda stream: contextlib.nullcontext(),
        synchronize=lambda device: None, is_current_stream_capturing=lambda: False,
    )  # fmt: skip

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def on_cpus(folder, few=symmetric.FEW, gpu=None):
    """Let ``"symmetric"`` run on CPUs; the buffer that an exchange gets holds NaN.

    ``few``: the constant `FEW`. ``gpu``: one that all ranks share; by default each has its own.
    """
    FileBuffer.folder = folder
    next_buffer = symmetric.Symmetric._next_buffer

    def poisoned(self, nbytes, device):
        buffer = next_buffer(self, nbytes, device)
        buffer.memory[self.rank].fill_(0xFF)
        return buffer

    with (
        mock.patch.object(symmetric, "torch", Torch()),
        mock.patch.object(symmetric, "why_not", return_value=None),
        mock.patch.object(symmetric, "SymmetricBuffer", FileBuffer),
        mock.patch.object(symmetric, "write_word", torch.Tensor.fill_),
        mock.patch.object(symmetric, "gpu_id", return_value=gpu or f"of rank {dist.get_rank()}"),
        mock.patch.object(symmetric, "FEW", few),
        mock.patch.object(symmetric.Symmetric, "_next_buffer", poisoned),
    ):
        yield
