"""What every reference test shares: seeds, and how hypothesis searches."""

import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("reference", deadline=None, max_examples=25, derandomize=bool(os.environ.get("CI")))
settings.load_profile("reference")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
