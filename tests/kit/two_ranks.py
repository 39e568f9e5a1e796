"""Processes of one group, started once: `Ranks.run` calls a function in all and returns what they return."""

import gc
import importlib
import inspect
import os
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.multiprocessing
from torch import distributed as dist

import fusedmoe as fm
from fusedmoe.ops import quantize as quantize_op

SIZE = 2
PATIENCE_S = 120
GIVE_UP = timedelta(seconds=60)  # in a collective: a rank whose test failed does not join it
TOKENS, HIDDEN = 24, 16  # of one rank; features


def batches(rank, count, dtype=torch.float64):
    """Tokens that want experts 0 and 1 on one rank, 2 and 3 on the other, and no others in the first layer."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        x = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
        x[:, 2 * rank : 2 * rank + 2] += 8
        yield x.to(dtype)


class Counted:
    """How often a weight is quantized."""

    def __enter__(self):
        self.count = 0
        quantize_op.quantize = self._quantize
        return self

    def _quantize(self, x, *args, **kwargs):
        self.count += x.dim() == 3
        return fm.quantize(x, *args, **kwargs)

    def __exit__(self, *_):
        quantize_op.quantize = fm.quantize


class Ranks:
    """``size`` processes of a group with this backend, which answer within ``patience_s`` seconds. After an error, new
    ones: others may wait for the rank that raised it.
    """

    def __init__(self, folder, size=SIZE, patience_s=PATIENCE_S, backend="gloo"):
        self._folder, self._size, self._starts, self._patience_s = folder, size, 0, patience_s
        self._backend = backend
        self._start()

    def _start(self):
        context = torch.multiprocessing.get_context("forkserver")
        # each process is a copy of one that has imported these
        context.set_forkserver_preload(["fusedmoe", "torch._dynamo", "torch.distributed.fsdp"])
        self._starts += 1
        store = str(self._folder / f"store{self._starts}")
        self._ends = []
        self._processes = []
        for rank in range(self._size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._size, store, theirs, self._backend), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)

    def run(self, function, *args, **options):
        """``[function(0, *args), function(1, *args), ...]``, of a function that a module of this folder defines."""
        for end in self._ends:
            end.send((function, args, options))
        until = time.monotonic() + self._patience_s
        answers = [self._answer(rank, end, until) for rank, end in enumerate(self._ends)]
        failed = [text for text, _ in answers if text]
        if failed:
            self.stop(patience_s=0)
            self._start()
        assert not failed, "\n".join(failed)
        return [result for _, result in answers]

    def _answer(self, rank, end, until):
        if not end.poll(max(until - time.monotonic(), 1)):
            return f"rank {rank} does not answer", None
        try:
            return end.recv()
        except EOFError:
            return f"rank {rank} is gone", None

    def stop(self, patience_s=10):
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(patience_s)
            if process.is_alive():
                process.kill()
                process.join()


def pool(tmp_path_factory, size=SIZE):
    """For a fixture: the processes, as long as its scope."""
    if not dist.is_available():
        pytest.skip("torch is built without distributed")
    started = Ranks(tmp_path_factory.mktemp("ranks"), size)
    yield started
    started.stop()


def in_ranks(pool, **fixed):
    """Make a test of ``function(rank, ...)``: it runs in all processes of a fixture, with these arguments and
    with the test's parameters.
    """

    def test_of(function):
        _, *named = inspect.signature(function).parameters

        def test(**given):
            given.pop(pool).run(_by_name, function.__module__, function.__name__, **fixed, **given)

        names = [pool, *(name for name in named if name not in fixed)]
        test.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names])
        test.__name__, test.__doc__, test.in_rank = function.__name__, function.__doc__, function
        return test

    return test_of


def _by_name(rank, module, name, **given):
    return getattr(importlib.import_module(module), name).in_rank(rank, **given)


def _serve(rank: int, size: int, store: str, requests: Connection, backend: str) -> None:
    from torch.distributed import _composable_state as fully_sharded

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    shared = dist.FileStore(store, size)
    shared.set_timeout(GIVE_UP)
    dist.init_process_group(backend, store=shared, rank=rank, world_size=size, timeout=GIVE_UP)
    while True:
        try:
            function, args, options = requests.recv()
        except EOFError:
            break
        if fully_sharded._module_state_mapping:  # beside such a module, weights of a call are not kept quantized
            gc.collect()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # of Dynamo
                answer = None, function(rank, *args, **options)
        except BaseException:  # noqa: BLE001  (told to whoever asked)
            answer = f"rank {rank}:\n{traceback.format_exc()}", None
        requests.send(answer)
    dist.destroy_process_group()
