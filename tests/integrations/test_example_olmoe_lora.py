"""examples/olmoe_lora.py: it runs, it learns, and before the first step it is the model that it was given."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
EXAMPLE = Path(__file__).parents[2] / "examples" / "olmoe_lora.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("olmoe_lora", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_learns(example, capsys):
    example.main(["--steps", "8"])
    printed = capsys.readouterr().out
    # 2 layers of 8 experts; A and B of gate_up (128, 64) and of down (64, 64)
    trained = 2 * 8 * 8 * ((64 + 128) + (64 + 64))
    assert f"trainable parameters: {trained:,} of " in printed
    before, after = (float(re.search(rf"loss {when}: +([0-9.]+)", printed)[1]) for when in ("before", "after"))
    assert after < before - 0.5


def test_only_the_update_is_trained_and_at_first_it_is_none(example):
    torch.manual_seed(0)
    model, rows = example.load(None, "cpu")
    weights = {name: p for name, p in model.named_parameters() if ".experts." in name}
    assert len(weights) == 4
    call = {"input_ids": rows[:2], "labels": rows[:2], "use_cache": False}
    expected = model(**call)
    trained = example.add_lora(model, rank=4, alpha=8)
    got = model(**call)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-4)
    got.loss.backward()
    assert {id(p) for p in model.parameters() if p.grad is not None} == {id(p) for p in trained}
    # taken over, not copied
    assert {id(p) for p in weights.values()} <= {id(p) for p in model.parameters()}
    assert sum(p.grad.any().item() for p in trained) == 4  # of each B; those of each A begin with the second step
