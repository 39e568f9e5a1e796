"""Global and shared memory, which check each access.

Global memory is the storage of the tensors that a launch was given: any other address is an error. Shared memory knows
which bytes an asynchronous copy is still writing or reading. It also knows which of the bytes that threads wrote are
not yet visible to the tensor copies and tensor cores (the *async proxy*), for want of a `fence.proxy.async`.
"""

import bisect
import ctypes

import numpy as np

GRANULE = 16  # bytes; the state of shared memory is kept per granule
RESERVED = 1024  # bytes at the start of shared memory, which a kernel does not use


class AccessError(Exception):
    """An access that a GPU need not survive, or whose result it does not define."""


class Global:
    """The memory of tensors, by address."""

    def __init__(self):
        self.starts, self.ends, self.bytes = [], [], []

    def add(self, tensor):
        """Admit the bytes of a tensor's storage."""
        storage = tensor.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if start == end:
            return
        at = bisect.bisect_right(self.starts, start)
        if at and self.ends[at - 1] >= end:
            return
        self.starts.insert(at, start)
        self.ends.insert(at, end)
        base, size = start & ~15, (end + 15 & ~15) - (start & ~15)
        self.bytes.insert(at, (np.frombuffer((ctypes.c_ubyte * size).from_address(base), np.uint8), base))

    def bytes_at(self, low, high):
        """Return the bytes of the tensor that contains [low, high), and their address."""
        at = bisect.bisect_right(self.starts, low) - 1
        while at >= 0:
            if high <= self.ends[at]:
                return self.bytes[at]
            at -= 1
        raise AccessError(f"global memory [{low:#x}, {high:#x}) is not of one tensor of this launch")

    def words(self, addresses, dtype):
        """Return an array of words, and the index of each address in it."""
        size = np.dtype(dtype).itemsize
        low, high = int(addresses.min()), int(addresses.max())
        view, base = self.bytes_at(low, high + size)
        index = (addresses - np.uint64(base)).astype(np.int64)
        if (index & (size - 1)).any():
            raise AccessError(f"an address is not a multiple of {size}")
        return view[: len(view) & ~(size - 1)].view(dtype), index // size


class Shared:
    """The shared memory of a CTA."""

    def __init__(self, size):
        self.size = size
        rounded = -(-size // GRANULE) * GRANULE
        self.bytes = np.full(rounded, 0xFF, np.uint8)  # NaN in each format
        self.granules = self.bytes.reshape(-1, GRANULE)
        self.of_type = {t: self.bytes.view(t) for t in (np.uint8, np.uint16, np.uint32, np.uint64)}
        count = rounded // GRANULE
        self.incoming = np.zeros(count, np.int16)  # asynchronous writes under way
        self.readers = np.zeros(count, np.int16)  # asynchronous reads under way
        self.written_at = np.full(count, -1, np.int64)  # by a thread
        self.writer = np.zeros(count, np.int16)  # its warp

    def words(self, addresses, dtype, *, write, now=0, warp=0):
        """Return an array of words, and the index of each address in it, for an access by threads."""
        size = np.dtype(dtype).itemsize
        low, high = int(addresses.min()), int(addresses.max())
        if high + size > self.size:
            raise AccessError(f"shared memory [{low:#x}, {high + size:#x}) of {self.size:#x} bytes")
        if (addresses & np.uint32(size - 1)).any():
            raise AccessError(f"an address of shared memory is not a multiple of {size}")
        granules = addresses >> 4
        if self.incoming[granules].any():
            raise AccessError("access to shared memory that a copy is still writing")
        if write:
            if self.readers[granules].any():
                raise AccessError("write to shared memory that a copy or a tensor core is still reading")
            self.written_at[granules] = now
            self.writer[granules] = warp
        return self.of_type[dtype], addresses // size

    def begin_write(self, granules):
        """Begin an asynchronous write."""
        if granules.max() >= len(self.granules):
            raise AccessError("an asynchronous copy writes past the end of shared memory")
        if self.incoming[granules].any():
            raise AccessError("two asynchronous copies write the same shared memory")
        if self.readers[granules].any():
            raise AccessError("an asynchronous copy overwrites shared memory that is still read")
        self.incoming[granules] += 1

    def finish_write(self, granules, values, *, written_at=-1, writer=0):
        """Finish an asynchronous write; `written_at` if threads' copies wrote it."""
        self.granules[granules] = values
        self.incoming[granules] -= 1
        self.written_at[granules] = written_at
        self.writer[granules] = writer

    def check_visible(self, granules, fences, warp):
        """Check that an asynchronous read by a warp sees all bytes; `fences` are the times of their last fences."""
        if granules.max() >= len(self.granules):
            raise AccessError("an asynchronous read past the end of shared memory")
        if self.incoming[granules].any():
            raise AccessError("an asynchronous read of shared memory that a copy is still writing")
        written = self.written_at[granules]
        unfenced = (written > fences[self.writer[granules]]) & (written > fences[warp])
        if unfenced.any():
            raise AccessError("an asynchronous read of bytes that threads wrote, without fence.proxy.async in between")
