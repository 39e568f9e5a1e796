"""Kernels from the disk cache or the compiler, and the list of those built ahead of time."""
