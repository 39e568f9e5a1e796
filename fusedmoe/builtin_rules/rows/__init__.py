"""Rules for kernels without a matrix product."""
