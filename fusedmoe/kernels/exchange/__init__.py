"""Kernels that exchange rows between the GPUs of one NVLink domain, through memory that all of them can address."""
