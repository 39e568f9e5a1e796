"""An emulated GPU of compute capability 9.0: the functions of fusedmoe's kernels, on CPU tensors.

    with emulated() as gpu:
        bind_grouped_gemm(x, weight, None, None, DEFAULT)(x, weight, None, offsets, None)  # runs its PTX

The launches of a process run with different seeds and speeds of the asynchronous units, in turn.
"""

import os
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch

from emulator import ptx
from emulator.host import Host, compiled
from emulator.machine import Launch, Machine
from fusedmoe.kernels.build import compiler
from fusedmoe.kernels.sm90 import launch

SMS = 4
EAGERNESS = (0.3, 0.0, 1.0)  # see machine


class EmulatedGpu:
    """Compiles kernels at their first use, and runs their launches."""

    def __init__(self, seed=0):
        self.seed = seed
        self.launches = 0
        self.others = []  # tensors that kernels find by addresses in memory
        self.counter = torch.zeros(1, dtype=torch.int32)
        self.hosts = {}  # with the programs of their launches, by kernel

    def load(self, kernel):
        """Return the function that launches a kernel, as `compiler.load`."""

        def run(*arguments):
            if kernel not in self.hosts:
                source, library = compiled(kernel)
                host = Host(library, kernel.symbol, ptx.parameter_sizes(source))
                self.hosts[kernel] = host, {program.name: program for program in ptx.parse(source)}
            host, programs = self.hosts[kernel]
            machine = Machine(self.seed + self.launches, EAGERNESS[self.launches % len(EAGERNESS)])
            self.launches += 1
            for argument in (*arguments, *self.others):
                if isinstance(argument, torch.Tensor):
                    machine.memory.add(argument)

            def launched(name, n, values):
                machine.run(Launch(programs[name], n[0:3], n[3:6], n[7:10], n[6], values))

            try:
                host(launched, *arguments)
            except BaseException:
                self.counter.zero_()  # as a launch leaves it that ends
                raise

        return run


def _forget_functions():
    """Clear the caches of functions that launch kernels."""
    for cached in (launch.ragged_m, launch.ragged_k, launch.ragged_m_kernel, launch.ragged_k_kernel):
        cached.cache_clear()


@contextmanager
def emulated(seed=None):
    """Pretend that the CPU is a GPU of compute capability 9.0 with `SMS` SMs.

    The seed is that of EMULATE_GPU, or 0, if none is given.
    """
    gpu = EmulatedGpu(int(os.environ.get("EMULATE_GPU", "0")) if seed is None else seed)
    counters = SimpleNamespace(get=lambda: (gpu.counter, 1))
    with ExitStack() as stack:
        for target, name, value in (
            (compiler, "_state", compiler._State({}, {}, set())),
            (compiler, "_load", gpu.load),
            (launch, "sm_count", lambda device: SMS),
            (launch, "_tile_counters", {torch.device("cpu"): counters}),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
        ):
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(patch("fusedmoe.fusion.program.plan_table.arch_of", lambda device: 90))
        _forget_functions()
        stack.callback(_forget_functions)
        yield gpu
