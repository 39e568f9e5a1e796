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
    before = dict(registry._registry.by_name)
    torch.manual_seed(0)
    yield
    left, registry._registry.by_name = registry._registry.by_name, before
    assert left == before, "a test left rules behind"
