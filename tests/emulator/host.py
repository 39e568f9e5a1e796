"""The host code of a compiled kernel, run on a CPU. Its launches are passed on to a function.

The object file of a kernel has host code, which checks the tensors, makes the descriptors of the tensor copies and
launches. Here it is linked to a CUDA runtime that launches nothing (``stub.c``). Tensors in CPU memory are given to it
as if they were on a GPU.
"""

import atexit
import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
import tvm_ffi
from cutlass import cute

from emulator import ptx
from emulator.machine import Launch

STUB = Path(__file__).with_name("stub.c")
LIBRARIES = Path(tvm_ffi.__file__).with_name("lib")
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_void_p))


@functools.cache
def compiled_stub():
    """Return the object file of the stub, once per process."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    subprocess.run(["gcc", "-c", "-fPIC", "-O1", "-mcmodel=large", "-o", folder / "stub.o", STUB], check=True)
    return folder / "stub.o"


class Host:
    """The host function of a kernel."""

    def __init__(self, kernel):
        with tempfile.TemporaryDirectory() as folder:
            source = self._compile(kernel, Path(folder))
            library = self._link(kernel.symbol, Path(folder))
            self.stub = ctypes.CDLL(str(library))
            self.function = tvm_ffi.load_module(str(library))[kernel.symbol]
        self.programs = {program.name: program for program in ptx.parse(source)}
        self.run = self.failure = None
        self.callback = CALLBACK(self._launched)
        self.stub.stub_set_callback(self.callback)

    @staticmethod
    def _compile(kernel, folder):
        plain = cute.compile
        cute.compile = lambda *args, options: plain(*args, options=f"{options} --keep-ptx --dump-dir {folder}")
        try:
            kernel.compile().export_to_c(object_file_path=str(folder / "kernel.o"), function_name=kernel.symbol)
        finally:
            cute.compile = plain
        (source,) = folder.glob("*.ptx")
        return source.read_text()

    @staticmethod
    def _link(symbol, folder):
        library = folder / f"{symbol}.so"
        command = ["gcc", "-shared", "-Wl,-Bsymbolic", "-o", library, folder / "kernel.o", compiled_stub()]
        command += [f"-L{LIBRARIES}", "-ltvm_ffi", f"-Wl,-rpath,{LIBRARIES}"]
        subprocess.run(command, check=True)
        return library

    def __call__(self, run, *arguments):
        """Call the host function with CPU tensors and numbers; `run` receives its launches."""
        self.run = run
        self.function(*(on_gpu(a) if isinstance(a, torch.Tensor) else a for a in arguments))
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def _launched(self, name, numbers, arguments):
        try:
            program = self.programs[name.decode()]
            values = tuple(ctypes.string_at(arguments[i], p.size) for i, p in enumerate(program.parameters))
            n = numbers[:10]
            self.run(Launch(program, tuple(n[0:3]), tuple(n[3:6]), tuple(n[7:10]), n[6], values))
        except BaseException as failure:  # noqa: BLE001 no exception passes through C
            self.failure = failure


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device", _Device), ("ndim", ctypes.c_int32), ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )  # fmt: skip


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_lent = {}  # what receivers of capsules still use, by the address of its description


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _given_back(address):
    del _lent[address]


CUDA = 2
DTYPES = {  # DLPack's code, bits and lanes
    torch.float32: (2, 32), torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.int32: (0, 32),
    torch.int64: (0, 64), torch.uint8: (1, 8), torch.int16: (0, 16), torch.int8: (0, 8),
    torch.float8_e4m3fn: (10, 8), torch.float8_e5m2: (12, 8), torch.float8_e8m0fnu: (14, 8),
    torch.float4_e2m1fn_x2: (17, 4, 2),
}  # fmt: skip


class on_gpu:  # noqa: N801, a conversion
    """A CPU tensor in the DLPack protocol, as a tensor of GPU 0 with the same addresses."""

    def __init__(self, tensor):
        self.tensor = tensor
        code, bits, *lanes = DTYPES[tensor.dtype]
        self.shape = (ctypes.c_int64 * tensor.dim())(*tensor.shape)
        self.strides = (ctypes.c_int64 * tensor.dim())(*tensor.stride())
        values = (
            tensor.data_ptr(),
            _Device(CUDA, 0),
            tensor.dim(),
            _DType(code, bits, *(lanes or [1])),
            self.shape,
            self.strides,
            0,
        )
        self.managed = _Managed(_Tensor(*values), None, ctypes.cast(_given_back, ctypes.c_void_p))

    def __dlpack__(self, **_):
        _lent[ctypes.addressof(self.managed)] = self
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.managed), b"dltensor", None)

    def __dlpack_device__(self):
        return (CUDA, 0)
