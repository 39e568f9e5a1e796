"""NVIDIA's grouped GEMMs for Blackwell (cudnn-frontend), run on a CPU.

Their checks, their compilation for sm_100a and their host code run. Kernels in PyTorch (`blackwell.soft_kernels`) read
and write memory through the descriptors and pointers of the host code, so that a wrong layout gives wrong values.
"""

import contextlib
import sys
from types import SimpleNamespace
from unittest import mock

import cudnn._torch_stream
import cudnn.api_base
import cudnn.gemm.cutedsl.grouped
import cutlass
import torch
from cutlass import cute

from blackwell.compiler import Compiler
from blackwell.soft_kernels import run

GROUPED = "cudnn.gemm.cutedsl.grouped."
COMPILING = (  # the modules that call cute.compile
    "glu._blockscaled_api", "dglu._blockscaled_api", "quant.api", "srelu.api", "dsrelu.api", "wgrad._blockscaled_api",
)  # fmt: skip
SMS = 148  # of a B200


@contextlib.contextmanager
def blackwell_on_cpu():
    """While active, cudnn-frontend's block-scaled grouped GEMMs run on CPU tensors. Yields the list of their launches.

    The stand-ins are seen by cudnn-frontend only. ``cute`` and ``cutlass`` are replaced as names in its modules. What
    it imports inside functions (``torch``) is replaced by functions that look at the module of their caller.
    """
    launches = []

    def launched(launch):
        launches.append(launch)
        run(launch)

    with contextlib.ExitStack() as stack:
        for name in COMPILING:
            module = sys.modules[GROUPED + name]
            stack.enter_context(mock.patch.object(module, "cute", Overlay(cute, compile=Compiler(launched))))
            utils = Overlay(cutlass.utils, HardwareInfo=HardwareInfo)
            stack.enter_context(mock.patch.object(module, "cutlass", Overlay(cutlass, utils=utils)))
        for name, stand_in in CUDA.items():
            stack.enter_context(_for_cudnn(torch.cuda, name, stand_in))
        stack.enter_context(_for_cudnn(torch, "empty", _aligned_empty))
        stack.enter_context(mock.patch.object(cudnn.api_base, "_RAW_STREAM", _default_stream))
        stack.enter_context(mock.patch.object(cudnn._torch_stream, "stream_context", _no_stream))
        yield launches


class Overlay:
    """A module, some of whose attributes are others."""

    def __init__(self, module, **attributes):
        self.__dict__.update(attributes)
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)


class HardwareInfo:
    """What the driver of a B200 answers."""

    def get_max_active_clusters(self, cluster_size):
        return SMS // cluster_size


CUDA = {
    "is_available": lambda: True,
    "current_device": lambda: 0,
    "get_device_capability": lambda device=None: (10, 0),
    "current_stream": lambda device=None: SimpleNamespace(cuda_stream=0),
}


def _for_cudnn(owner, name, stand_in):
    plain = getattr(owner, name)

    def chosen(*args, **kwargs):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return (stand_in if caller.split(".")[0] == "cudnn" else plain)(*args, **kwargs)

    return mock.patch.object(owner, name, chosen)


def _aligned_empty(size, *, dtype, device, plain=torch.empty):
    """``torch.empty`` in CPU memory. As on a GPU the address is a multiple of 128, which workspaces need."""
    if not isinstance(size, int):
        return plain(size, dtype=dtype)
    memory = plain(size + 128 // dtype.itemsize, dtype=dtype)
    skipped = -memory.data_ptr() % 128 // dtype.itemsize
    return memory[skipped : skipped + size]


def _default_stream(device):
    return 0


@contextlib.contextmanager
def _no_stream(stream, device=None):
    yield
