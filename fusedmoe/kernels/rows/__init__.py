"""Kernels without a matrix product, for every architecture."""
