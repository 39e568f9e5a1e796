"""Descriptors of tensor copies (TMA): the 128 bytes that the host code of a kernel writes."""

from dataclasses import dataclass

import numpy as np

from emulator.arithmetic import from_bf16, to_bf16

# bytes: u8 and FP8, u16, u32, u64, fp16, fp32, bf16, FP4
SIZES = {0: 1, 1: 2, 2: 4, 4: 8, 6: 2, 7: 4, 10: 2, 11: 0.5}
FP32, BF16, FP4 = 7, 10, 11
SWIZZLES = (0, 32, 64, 128)  # bytes


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory, and the box that one copy moves. Axes are innermost first."""

    address: int
    element: int  # a key of SIZES
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    box: tuple[int, ...]
    swizzle: int  # bytes

    @classmethod
    def decode(cls, data):
        words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, 64, 8)]
        low = [w & 0xFFFFFFFF for w in words]
        high = [w >> 32 for w in words]
        rank = (words[1] >> 4 & 7) + 1
        element = words[1] >> 7 & 15
        shape = [low[4], high[4], low[5], high[5], low[6]]
        strides = [SIZES[element], high[1] << 4, low[2] << 4, high[2] << 4, low[3] << 4]
        box = [words[6] >> 56, words[7] & 255, words[7] >> 8 & 255, words[7] >> 16 & 255, words[7] >> 24 & 255]
        return cls(
            words[0], element, tuple(n + 1 for n in shape[:rank]), tuple(strides[:rank]),
            tuple(n + 1 for n in box[:rank]), SWIZZLES[words[1] >> 13 & 3],
        )  # fmt: skip

    @property
    def size(self):
        """Bytes of a box."""
        return int(np.prod(self.box)) * SIZES[self.element]

    def granules(self, address):
        """Return the 16-byte granules of shared memory that hold a box, in the order of its elements."""
        inner = self.box[0] * SIZES[self.element]
        assert address % 128 == 0, "a box in shared memory is aligned to 128 bytes"
        assert not self.swizzle or inner == self.swizzle, "a row of a box is as wide as the swizzle"
        return swizzled(address + np.arange(0, self.size, 16), self.swizzle) >> 4

    def _part(self, coordinates):
        """Return the part of a box inside the tensor: slices of the box, outermost axis first; its address."""
        slices, address = [], self.address
        for at, n, width, stride in zip(coordinates, self.shape, self.box, self.strides, strict=True):
            first, last = max(at, 0), min(at + width, n)
            if first >= last:
                return None, 0
            slices.append(slice(first - at, last - at))
            address += first * stride
        return tuple(reversed(slices)), address & (1 << 64) - 1

    def _window(self, memory, slices, address):
        """Return the part of global memory, one axis more than the box: the bytes of an element."""
        shape = [s.stop - s.start for s in slices]
        strides = list(reversed(self.strides))
        last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n > 1) + SIZES[self.element]
        data, base = memory.bytes_at(address, address + last)
        strides = [s if n > 1 else 0 for n, s in zip(shape, strides, strict=True)]
        window = data[address - base :]
        return np.lib.stride_tricks.as_strided(window, (*shape, SIZES[self.element]), (*strides, 1))

    def load(self, memory, coordinates):
        """Return a box as granules. Elements outside of the tensor are zeros."""
        box = np.zeros((*reversed(self.box), SIZES[self.element]), np.uint8)
        slices, address = self._part(coordinates)
        if slices is not None:
            box[slices] = self._window(memory, slices, address)
        return box.reshape(-1, 16)

    def store(self, memory, coordinates, granules, *, add=False):
        """Write a box, or add it to the tensor. Elements outside of the tensor are left out."""
        slices, address = self._part(coordinates)
        if slices is None:
            return
        box = granules.reshape(*reversed(self.box), SIZES[self.element])[slices]
        window = self._window(memory, slices, address)
        if add:
            box = self._sum(np.ascontiguousarray(window), np.ascontiguousarray(box)).view(np.uint8)
        window[...] = box

    def _sum(self, old, new):
        if self.element == BF16:
            return to_bf16(from_bf16(old.view(np.uint16)) + from_bf16(new.view(np.uint16)))
        assert self.element == FP32, "copies add in fp32 and bf16 only"
        return old.view(np.float32) + new.view(np.float32)


def swizzled(addresses, width):
    """Return where an address of a swizzled layout is."""
    rows = {0: 0, 32: 1, 64: 3, 128: 7}[width]
    return addresses ^ (addresses >> 7 & rows) << 4
