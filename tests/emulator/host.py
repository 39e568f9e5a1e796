"""The host code of a compiled kernel, run on a CPU. Its launches are passed on to a function.

The object file of a kernel has host code, which checks the tensors, makes the descriptors of the tensor copies and
launches. Here it is linked to a CUDA runtime that launches nothing (``stub.c``). Tensors in CPU memory are given to it
as if they were on a GPU.
"""

import ctypes
import pickle
import subprocess
import tempfile
from pathlib import Path

import torch
import tvm_ffi
from kit.compiled import compile_keeping
from kit.kept import contents, kept

from fusedmoe.kernels.build.cache_key import key

STUB = Path(__file__).with_name("stub.c")
LIBRARIES = Path(tvm_ffi.__file__).with_name("lib")
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_void_p))


class Host:
    """The host function of compiled code. ``library``: what `linked` returned; ``sizes``: see `ptx.parameter_sizes`."""

    def __init__(self, library, symbol, sizes):
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(library)
            file.flush()
            self.stub = ctypes.CDLL(file.name)
            self.function = tvm_ffi.load_module(file.name)[symbol]
        self.sizes = sizes
        self.launched = self.failure = None
        self.callback = CALLBACK(self._callback)
        self.stub.stub_set_callback(self.callback)

    def __call__(self, launched, *arguments):
        """Call the host function with CPU tensors and numbers; ``launched(name, numbers, values)`` is each launch.

        The numbers are the grid, the block, the bytes of shared memory, the cluster, and whether the launch has the
        attribute of programmatic stream serialization; values are bytes of parameters.
        """
        self.launched = launched
        self.function(*(on_gpu(a) if isinstance(a, torch.Tensor) else a for a in arguments))
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def _callback(self, name, numbers, arguments):
        try:
            name = name.decode()
            values = [ctypes.string_at(arguments[i], size) for i, size in enumerate(self.sizes[name])]
            self.launched(name, tuple(numbers[0:11]), values)
        except BaseException as failure:  # noqa: BLE001 no exception passes through C
            self.failure = failure


def compiled(kernel, *parts):
    """Return the PTX of a kernel and its library, kept between runs. ``parts``: see `kit.compiled.compiled`."""

    def compile_():
        with tempfile.TemporaryDirectory() as folder:
            library = linked(compile_keeping(kernel, "ptx", folder), kernel.symbol, Path(folder))
            (source,) = Path(folder).glob("*.ptx")
            return pickle.dumps((source.read_text(), library))

    return pickle.loads(kept(["PTX", key(kernel), str(LIBRARIES), *contents(STUB, __file__), *parts], compile_))


def linked(compiled, symbol, folder, major=9):
    """Return a shared library with the host code of a compiled kernel, whose function gets a name.

    ``major`` is that of the compute capability which the runtime says.
    """
    compiled.export_to_c(object_file_path=str(folder / "kernel.o"), function_name=symbol)
    library = folder / "kernel.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-mcmodel=large", "-Wl,-Bsymbolic", f"-DMAJOR={major}", "-o", library]
    command += [folder / "kernel.o", STUB, f"-L{LIBRARIES}", "-ltvm_ffi", f"-Wl,-rpath,{LIBRARIES}"]
    subprocess.run(command, check=True)
    return library.read_bytes()


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
        dtype = _DType(code, bits, *(lanes or [1]))
        described = _Tensor(tensor.data_ptr(), _Device(CUDA, 0), tensor.dim(), dtype, self.shape, self.strides, 0)
        self.managed = _Managed(described, None, ctypes.cast(_given_back, ctypes.c_void_p))

    def __dlpack__(self, **_):
        _lent[ctypes.addressof(self.managed)] = self
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.managed), b"dltensor", None)

    def __dlpack_device__(self):
        return (CUDA, 0)
