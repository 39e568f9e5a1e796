"""Kernels that move rows between tokens and experts, and sum them."""
