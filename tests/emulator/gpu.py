"""An emulated GPU of compute capability 9.0: the functions of fusedmoe's kernels, on CPU tensors.

    with emulated() as gpu:
        bind_grouped_gemm(x, weight, None, None, DEFAULT)(x, weight, None, offsets, None)  # runs its PTX

The launches of a process run with different seeds and speeds of the asynchronous units, in turn. They end before the
host goes on, except with ``gpu.beside``:

- A launch that lets the next one begin is kept until there is another launch, or `EmulatedGpu.finish`.
- If the next launch has the attribute for it, both run beside each other. Otherwise it runs after the end of the other.
- The first launch of a kernel loads its code, which waits until the GPU has nothing to do, as CUDA does. So a launch
  that waits for it never ends.
"""

import os
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from emulator import ptx
from emulator.host import Host, compiled
from emulator.machine import Launch, Machine
from fusedmoe.kernels.build import compiler
from fusedmoe.kernels.sm90 import launch

SMS = 4
EAGERNESS = (0.3, 0.0, 1.0)  # see machine


class Begun(NamedTuple):
    """A launch that has not ended."""

    machine: Machine
    rounds: Any  # those that are left
    arguments: tuple  # whose memory it uses


class EmulatedGpu:
    """Compiles kernels at their first use, and runs their launches."""

    def __init__(self, seed=0):
        self.seed = seed
        self.launches = 0
        self.others = []  # tensors that kernels find by addresses in memory
        self.counter = torch.zeros(1, dtype=torch.int32)
        self.hosts = {}  # with the programs of their launches, by kernel
        self.beside = False  # whether launches run beside each other, see the module's docstring
        self.begun = None  # the launch that lets the next one begin
        self.began_beside = 0  # launches

    def load(self, kernel):
        """Return the function that launches a kernel, as `compiler.load`."""

        def run(*arguments):
            if kernel not in self.hosts:
                self.finish()
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
                launch = Launch(programs[name], n[0:3], n[3:6], n[7:10], n[6], values)
                self._run(launch, machine, arguments, begins_early=n[10])

            try:
                host(launched, *arguments)
            except BaseException:
                self.counter.zero_()  # as a launch leaves it that ends
                raise

        return run

    def finish(self):
        """Wait until all launches have ended."""
        begun, self.begun = self.begun, None
        if begun is not None:
            for _ in begun.rounds:
                pass

    def _run(self, launch, machine, arguments, begins_early):
        if not begins_early or self.begun is None:
            self.finish()
            rounds = machine.rounds(launch)
            if self.beside and any("launch_dependents" in i.opcode for i in launch.program.instructions):
                self.begun = Begun(machine, rounds, arguments)
            else:
                for _ in rounds:
                    pass
            return
        first, self.begun = self.begun, None
        self.began_beside += 1
        for _ in first.rounds:
            if first.machine.lets_next_begin:
                break
        for _ in machine.rounds(launch, first.machine):
            for _ in range(machine.random.randrange(3)):
                next(first.rounds, None)


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
