"""What the demo's numbers mean: bits per byte, and the sample."""

import math

import pytest
import torch

from fusedmoe.commands.demo.data import load_split
from fusedmoe.commands.demo.evaluate import bits_per_byte, sample
from fusedmoe.commands.demo.model import ByteTransformer, ModelConfig
from fusedmoe.commands.demo.run import clock, printable, verdict

CONFIG = ModelConfig(layers=1, hidden=16, heads=2, experts=4, top_k=2, intermediate=8, context=10, dropout=0.5)


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = ByteTransformer(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize("length", [2, 10, 11, 12, 95])
def test_bits_per_byte_predicts_every_byte_but_the_first_once(model, length):
    text = load_split().held_out[:length]
    bits = bits_per_byte(model, text)
    assert model.training
    model.eval()
    nats = []
    with torch.no_grad():
        for position in range(1, length):
            start = (position - 1) // 10 * 10
            logits, _ = model(text[None, start:position].long())
            nats.append(-logits[0, -1].double().log_softmax(-1)[int(text[position])])
    assert bits == pytest.approx(float(sum(nats)) / (length - 1) / math.log(2), rel=1e-5)


def test_a_model_that_knows_nothing_needs_eight_bits(model):
    torch.nn.init.zeros_(model.embedding.weight)
    assert bits_per_byte(model, load_split().held_out[:500]) == pytest.approx(8.0, rel=1e-6)


def test_a_sample_depends_on_its_seed_alone(model):
    state = torch.get_rng_state()
    text = sample(model, b"The ", 30, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.randn(3)
    assert sample(model, b"The ", 30, seed=5) == text
    assert sample(model, b"The ", 30, seed=6) != text
    assert text.startswith(b"The ")
    assert len(text) == 34


def test_a_sample_prints_without_control_characters():
    text = printable(b"a\x1b[31mb\r\tc\x00\nd \xc3\xbc \xff\xe2\x80\xae")
    assert text == "a�[31mb��c�\nd ü ��"


def test_verdict_and_clock():
    assert "Below" in verdict(2.0, 3.5)
    assert "1.500" in verdict(2.0, 3.5)
    assert "NOT below" in verdict(3.5, 3.5)
    assert clock(59.2) == "1 min 0 s"
    assert clock(3.0) == "3 s"
