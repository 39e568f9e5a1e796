"""Memory that a kernel forgets to write shows."""

from contextlib import contextmanager

import torch


@contextmanager
def nan_in_new_tensors():
    """What `torch.empty` returns is full of NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
