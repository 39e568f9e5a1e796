"""What every test here starts from: nothing said yet, no rule but the built-in ones, one thread."""

import pytest
import torch

from fusedmoe.fusion import registry
from fusedmoe.fusion.log import forget_said


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("FUSEDMOE_DISABLE", raising=False)
    monkeypatch.delenv("FUSEDMOE_DEBUG", raising=False)
    forget_said()
    before = registry.rules()
    torch.manual_seed(0)
    yield
    assert registry.rules() == before, "a test left rules behind"
