"""The host code that the compiler made for a kernel of cudnn-frontend, run on a CPU.

The object file is linked to a CUDA runtime that launches nothing (``emulator/stub.c``). Each launch calls back with the
values of the kernel's parameters.
"""

import ctypes
import re
import subprocess
import tempfile

import torch
import tvm_ffi
from emulator.host import CALLBACK, LIBRARIES, STUB, on_gpu


class Host:
    """The host function of compiled code.

    `library` has the bytes that :func:`linked` returned, and `sizes` are those of :func:`parameter_sizes`.
    """

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
        """Call the host function; ``launched(name, numbers, parameters)`` is called at each of its launches.

        `numbers` are the grid, the block, the bytes of shared memory and the cluster; `parameters` are bytes.
        """
        self.launched = launched
        self.function(*(on_gpu(a) if isinstance(a, torch.Tensor) else a for a in arguments))
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def _callback(self, name, numbers, arguments):
        try:
            name = name.decode()
            parameters = [ctypes.string_at(arguments[i], size) for i, size in enumerate(self.sizes[name])]
            self.launched(name, tuple(numbers[0:10]), parameters)
        except BaseException as failure:  # noqa: BLE001 no exception passes through C
            self.failure = failure


def linked(compiled, symbol, folder):
    """Return a shared library with the host code of a compiled kernel, whose function gets a name."""
    compiled.export_to_c(object_file_path=str(folder / "kernel.o"), function_name=symbol)
    library = folder / "kernel.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-mcmodel=large", "-Wl,-Bsymbolic", "-DMAJOR=10", "-o", library]
    command += [folder / "kernel.o", STUB, f"-L{LIBRARIES}", "-ltvm_ffi", f"-Wl,-rpath,{LIBRARIES}"]
    subprocess.run(command, check=True)
    return library.read_bytes()


def parameter_sizes(ptx):
    """Return the bytes of each parameter of each kernel of a PTX source, by the kernel's name."""
    return {
        name: [_bytes(declaration) for declaration in declarations.split(",")]
        for name, declarations in re.findall(r"\.entry ([^\s(]+)\(([^)]*)\)", ptx)
    }


def _bytes(declaration):
    array = re.search(r"\.b8 \S*\[(\d+)\]", declaration)
    if array:
        return int(array.group(1))
    return int(re.search(r"\.[a-z](\d+) ", declaration).group(1)) // 8
