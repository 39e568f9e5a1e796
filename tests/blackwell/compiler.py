"""``cute.compile`` for a machine without a GPU: it compiles for sm_100a, and what it returns runs soft kernels."""

import enum
import functools
import pickle
import tempfile
import types
from pathlib import Path
from typing import ClassVar

import cutlass
from cuda.bindings import driver
from cutlass import cute
from cutlass.cute.runtime import _FakeTensor, make_fake_compact_tensor, make_fake_tensor
from emulator import host as hosts
from emulator.host import LIBRARIES, STUB, Host, linked
from emulator.ptx import parameter_sizes
from kit.kept import contents, kept, versions

from blackwell import launches
from blackwell.launches import Launch, Parameters, memory, spied
from fusedmoe.kernels.build.cache_key import built_with

SYMBOL = "blackwell_on_cpu"  # of the host function in each library
OPTIONS = "--gpu-arch sm_100a --keep-ptx --dump-dir"


class Compiler:
    """Stands for ``cute.compile`` in the modules of cudnn-frontend.

    Compiled kernels are kept for the life of the process, by everything that the compiler was told.
    """

    kept: ClassVar = {}

    def __init__(self, launched):
        self.launched = launched  # called with each Launch

    def __call__(self, kernel, *args, options, **kwargs):
        args = [_in_global_memory(a) for a in args]
        key = Key().of((type(kernel), vars(kernel), args, kwargs, options))
        if key not in self.kept:
            self.kept[key] = Compiled(kernel, args, kwargs, options, key)
        compiled = self.kept[key]
        return lambda *arguments: compiled(self.launched, *arguments)


class Compiled:
    """A kernel compiled for sm_100a and its host code, which are kept between runs."""

    def __init__(self, kernel, args, kwargs, options, key):
        self.kernel = kernel

        def compile_():
            return pickle.dumps(self._compile(args, kwargs, options))

        library, sizes, traced, attributes = pickle.loads(kept([repr(key), *sources()], compile_))
        vars(kernel).update(attributes)
        self.host = Host(library, SYMBOL, sizes)
        self.parameters = Parameters(traced)

    def _compile(self, args, kwargs, options):
        """Return the library, the sizes of the kernels' parameters, what was traced, and the kernel's attributes."""
        with tempfile.TemporaryDirectory() as folder, spied(self.kernel) as traced:
            compiled = cute.compile(self.kernel, *args, options=f"{options} {OPTIONS} {folder}", **kwargs)
            (source,) = Path(folder).glob("*.ptx")
            sizes = parameter_sizes(source.read_text())
            library = linked(compiled, SYMBOL, Path(folder), major=10)
        return library, sizes, traced, {n: v for n, v in vars(self.kernel).items() if is_plain(v)}

    def __call__(self, launched, *arguments):
        seen = []

        def record(name, numbers, values):
            index = int(name.rsplit("_", 1)[1])  # the compiler numbers the kernels as it traces them
            method, *values = self.parameters.named(index, values)
            seen.append(Launch(self.kernel, method, numbers[0:3], numbers[3:6], numbers[7:10], numbers[6], *values))

        self.host(record, *map(_at_run_time, arguments))
        for launch in seen:
            launched(launch)


@functools.cache
def sources():
    """All that compiled code depends on, besides the arguments of the compiler."""
    files = contents(STUB, __file__, hosts.__file__, launches.__file__)
    return [*map(str, built_with()), *versions("nvidia-cudnn-frontend"), str(LIBRARIES), *files]


def is_plain(value):
    """Whether a value is of use in another process: numbers, types, and tuples of them, but no layouts."""
    try:
        pickle.dumps(value)
    except (AttributeError, TypeError, pickle.PicklingError):
        return False
    return True


def _in_global_memory(argument):
    """Return a tensor for the compiler: those that describe real CPU memory become ones on a GPU."""
    if is_real(argument):
        if argument.element_type is cutlass.Float4E2M1FN:  # operands of wgrad, for any number of rows
            dynamic = argument.dynamic_shapes_mask
            shape = [cute.sym_int(divisibility=16) if d else n for n, d in zip(argument.shape, dynamic, strict=True)]
            strides = [1 if stride == 1 else cute.sym_int64(divisibility=16) for stride in argument.stride]
            return make_fake_tensor(argument.element_type, tuple(shape), tuple(strides), assumed_align=16)
        assert argument.element_type is cutlass.Uint8  # a workspace
        return make_fake_compact_tensor(cutlass.Uint8, tuple(argument.shape), assumed_align=128)
    return argument


def _at_run_time(argument):
    """Return what the host function takes: a tensor, a number or None."""
    if is_real(argument):
        return memory(argument.data_ptr, argument.shape[0])
    if isinstance(argument, driver.CUstream):
        return int(argument)
    if isinstance(argument, cute.Pointer):
        return int(argument._pointer)
    if isinstance(argument, cutlass.Numeric):
        return argument.value
    return argument


class Key:
    """A hashable value of everything that compiled code depends on. Symbolic sizes are numbered as they appear."""

    def __init__(self):
        self.symbols = {}

    def of(self, value):
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            return value
        if isinstance(value, type | enum.Enum):
            return str(value)
        if isinstance(value, (tuple, list)):
            return tuple(self.of(v) for v in value)
        if isinstance(value, dict):
            return tuple((k, self.of(v)) for k, v in value.items())
        if callable(value) and hasattr(value, "__code__"):
            return self.of((value.__code__, [cell.cell_contents for cell in value.__closure__ or ()]))
        if isinstance(value, types.CodeType):
            return (value.co_code, value.co_names, self.of(value.co_consts))
        if isinstance(value, cute.SymInt):
            number, _ = self.symbols.setdefault(id(value), (len(self.symbols), value))
            return ("symbol", number, value._width, value._divisibility)
        if isinstance(value, cute.Pointer):
            return ("pointer", str(value._dtype), value._assumed_align)
        if isinstance(value, cute.Tensor):
            return (str(value.element_type), self.of(value.shape), self.of(value.stride), value._assumed_align)
        return (str(type(value)), self.of(vars(value)))


def is_real(argument):
    """Whether a tensor of the CuTe DSL describes memory (the class of such tensors claims to be their base class)."""
    return isinstance(argument, cute.Tensor) and not isinstance(argument, _FakeTensor)
