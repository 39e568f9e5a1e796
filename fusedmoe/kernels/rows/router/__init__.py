"""Kernels that choose experts from logits."""
