"""What every reference test shares: seeds, and how hypothesis searches."""

import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("reference", deadline=None, max_examples=25, derandomize=bool(os.environ.get("CI")))
settings.load_profile("reference")


@pytest.fixture(autouse=True)
def _seed():
    torch.default_generator.manual_seed(0)  # torch.manual_seed asks for every device too, and takes 0.6 ms
