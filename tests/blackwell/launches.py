"""Launches of cudnn-frontend's kernels: parameters by name, and memory behind descriptors and pointers as tensors."""

import contextlib
import ctypes
import inspect
import struct
from dataclasses import dataclass, replace

import torch
from cutlass.base_dsl.utils.mlir_value_tree import extract_mlir_values
from emulator.tensor_map import FP4, SIZES, TensorMap


@contextlib.contextmanager
def spied(kernel):
    """Yield a list of the methods that are traced as kernels, which is filled while the kernel is compiled.

    Of each: its name, {argument: number of parameters}, {argument: constant}.
    """
    traced = []

    def spy_on(name, method):
        signature = inspect.signature(method)

        def spy(*args, **kwargs):
            arguments = signature.bind(*args, **kwargs).arguments
            counts = {name: _count(value) for name, value in arguments.items()}
            constants = {name: value for name, value in arguments.items() if isinstance(value, int | float)}
            traced.append((name, counts, constants))
            return method(*args, **kwargs)

        setattr(kernel, name, spy)

    methods = ("helper_kernel", "kernel")
    for name in methods:
        spy_on(name, getattr(kernel, name))
    try:
        yield traced
    finally:
        for name in methods:
            delattr(kernel, name)


class Parameters:
    """Which parameters a kernel has, learned while it was traced (:func:`spied`).

    A kernel of the CuTe DSL is a method. Its arguments become parameters in their order: none where an argument is None
    or known at compile time, one for a descriptor, a tensor or a number, several for a structure of them.
    """

    def __init__(self, traced):
        self.traced = traced

    def named(self, index, values):
        """Return the method of a traced kernel, the values of its parameters by argument, and its constants."""
        method, counts, constants = self.traced[index]
        assert sum(counts.values()) == len(values), f"{method} has {len(values)} parameters; {counts} were traced"
        values = iter(values)
        named = {name: tuple(next(values) for _ in range(count)) for name, count in counts.items() if count}
        return method, named, constants


def _count(value):
    if value is None or callable(value) or isinstance(value, int | float):
        return 0
    types = [str(v.type) for v in extract_mlir_values(value)]
    return sum("?" in t or not t.startswith(("!cute.layout", "!cute.coord_tensor")) for t in types)  # "?": not constant


@dataclass(frozen=True)
class Launch:
    """One launch. `kernel` is cudnn-frontend's object: its attributes are the constants that it was compiled with."""

    kernel: object
    name: str  # "kernel", or "helper_kernel" which prepares the launch of "kernel"
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared: int  # bytes
    parameters: dict[str, tuple[bytes, ...]]  # by the name of the kernel's argument
    constants: dict[str, float]  # arguments that were numbers at compile time

    def __contains__(self, name):
        return name in self.parameters

    def one(self, name):
        (value,) = self.parameters[name]
        return value

    def tensor_map(self, name):
        """Return the decoded TMA descriptor of an argument."""
        return TensorMap.decode(self.one(name))

    def number(self, name):
        """Return an fp32 argument: a parameter of the launch, or a constant of the compiled kernel."""
        if name in self.constants:
            return float(self.constants[name])
        return struct.unpack("f", self.one(name))[0]

    def address(self, name):
        return int.from_bytes(self.one(name)[:8], "little")

    def array(self, name, length, dtype):
        """Return `length` elements from the pointer of a tensor argument on."""
        return memory(self.address(name), length * dtype.itemsize).view(dtype)

    def tensor(self, name, dtype):
        """Return the tensor that a descriptor spans, outermost axis first."""
        described = self.tensor_map(name)
        assert SIZES[described.element] == dtype.itemsize, f"{name} is copied by elements of another size than {dtype}"
        return _strided(described, dtype)

    def codes(self, name):
        """Return the codes that a descriptor spans, outermost axis first: E4M3, or one E2M1 in each byte."""
        described = self.tensor_map(name)
        if described.element != FP4:
            return self.tensor(name, torch.float8_e4m3fn)
        (length, *others), (_, *strides) = described.shape, described.strides
        pairs = _strided(replace(described, shape=(length // 2, *others), strides=(1, *strides)), torch.uint8)
        return torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)

    def scales(self, name):
        """Return the bytes of scales that a descriptor spans: (..., tiles of rows, tiles of columns, 512).

        A tile of 128 x 4 scales is 512 bytes. The innermost axis of these descriptors counts larger units than bytes,
        and has a tile, or all tiles of a row.
        """
        described = self.tensor_map(name)
        size = described.shape[0] * SIZES[described.element]
        assert size % 512 == 0, f"{name} is not a descriptor of tiles of 512 scales"
        axes = [*zip(described.shape[1:], described.strides[1:], strict=True)]
        if size > 512:
            axes.append((size // 512, 512))
        # tiles of a row follow each other; a matrix may have a single one of them
        axes.sort(key=lambda axis: (axis[1], axis[0]), reverse=True)
        shape, strides = zip(*axes, (512, 1), strict=True)
        last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        return memory(described.address, last).as_strided(shape, strides).contiguous()


def _strided(described, dtype):
    shape, strides = described.shape[::-1], described.strides[::-1]
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + dtype.itemsize
    flat = memory(described.address, last).view(dtype)
    return flat.as_strided(shape, [s // dtype.itemsize for s in strides])


def memory(address, size):
    """Return `size` bytes at an address as a tensor."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)
