"""The demo: its text, its transformer, its training, resumption bit for bit, and errors."""

import json
import math
from argparse import Namespace
from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import nn

import fusedmoe as fm
from benchmarks import demo as compare
from fusedmoe.call import settings
from fusedmoe.commands.demo import command
from fusedmoe.commands.demo.command import printable, sample, verdict
from fusedmoe.commands.demo.data import (
    Split,
    bigram_bits_per_byte,
    load_split,
)
from fusedmoe.commands.demo.model import ByteTransformer
from fusedmoe.commands.demo.options import job_of
from fusedmoe.commands.demo.train import (
    BETAS,
    WEIGHT_DECAY,
    MasterAdamW,
    Trainer,
    bits_per_byte,
    resumed,
    train,
)

TINY = {
    "layers": 1, "hidden": 32, "heads": 2, "experts": 4, "top_k": 2, "intermediate": 32, "context": 10, "batch": 4,
    "steps": 16, "device": "cpu", "dtype": "float32",
}  # fmt: skip
WHOLE = load_split()
LITTLE = Split(train=WHOLE.train[:50_000], held_out=WHOLE.held_out[:500])


def paragraphs_of(text):
    paragraphs = bytes(text.tolist()).decode().split("\n\n")
    return {" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip()}


def test_a_tenth_of_the_distinct_paragraphs_is_held_out():
    from pydoc_data.topics import topics

    train, held_out = paragraphs_of(WHOLE.train), paragraphs_of(WHOLE.held_out)
    assert not train & held_out
    everything = {" ".join(p.split()) for page in topics.values() for p in page.split("\n\n") if p.strip()}
    assert train | held_out == everything
    assert len(WHOLE.held_out) / (len(WHOLE.held_out) + len(WHOLE.train)) == pytest.approx(0.1, abs=0.02)


def with_all_weights_random(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def test_a_later_byte_changes_nothing_before_it():
    torch.manual_seed(0)
    sizes = TINY | {"layers": 2, "hidden": 16, "intermediate": 8, "context": 12}
    model = with_all_weights_random(ByteTransformer(job_of(sizes))).eval()
    text = torch.randint(256, (1, 12))
    changed = text.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    with torch.no_grad():
        before, after = model(text)[0], model(changed)[0]
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert all((before[0, i] - after[0, i]).abs().max() > 1e-3 for i in range(7, 12))  # and much from it on


def gradients_into(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def test_float32_is_plain_adamw_with_decay_on_matrices_alone():
    torch.manual_seed(0)
    model, expected = nn.Linear(4, 3), nn.Linear(4, 3)
    expected.load_state_dict(model.state_dict())
    ours = MasterAdamW(model)
    groups = [
        {"params": [expected.weight], "weight_decay": WEIGHT_DECAY},
        {"params": [expected.bias], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, lr=0.01, betas=BETAS)
    for step in range(3):
        gradients_into(model, step)
        gradients_into(expected, step)
        ours.step(0.01)
        plain.step()
    torch.testing.assert_close(model.weight, expected.weight)
    torch.testing.assert_close(model.bias, expected.bias)


def test_updates_too_small_for_a_bfloat16_weight_add_up():
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = MasterAdamW(model)
    for _ in range(20):
        model.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
        optimizer.step(1e-3)  # an eighth of what bfloat16 can tell from 1
    assert model.weight.item() == pytest.approx(0.98, abs=4e-3)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return with_all_weights_random(ByteTransformer(job_of(TINY | {"dropout": 0.5})))


@pytest.mark.parametrize("length", [2, 11, 95])
def test_bits_per_byte_predicts_every_byte_but_the_first_once(model, length):
    text = LITTLE.held_out[:length]
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


def test_a_sample_depends_on_its_seed_alone(model):
    state = torch.get_rng_state()
    text = sample(model, b"The ", 30)
    assert torch.equal(torch.get_rng_state(), state)
    torch.randn(3)
    assert sample(model, b"The ", 30) == text
    assert (text[:4], len(text)) == (b"The ", 34)
    assert verdict(2.0, 3.5).startswith("Below the bigram model by 1.500")
    assert verdict(3.5, 3.5).startswith("NOT below")
    assert printable(b"a\x1b[31mb\r\tc\x00\nd \xc3\xbc \xff\xe2\x80\xae") == "a�[31mb��c�\nd ü ��"


def trained(folder, **given):
    folder.mkdir()
    trainer = Trainer(job_of(TINY | given), LITTLE)
    train(trainer, folder, lambda line: None)
    return trainer


def test_a_run_learns_and_has_as_many_results_as_steps(tmp_path):
    lines = []
    trainer = Trainer(job_of(TINY | {"steps": 60, "batch": 16, "lr": 1e-2}), LITTLE)
    train(trainer, tmp_path, lines.append)
    assert sum(trainer.losses[-10:]) < sum(trainer.losses[:10]) - 10
    assert len(trainer.losses) == len(trainer.loads) == 60
    assert {tuple(load.shape) for load in trainer.loads} == {(1, 4)}
    assert [step for step, _ in trainer.evaluations] == [8, 16, 24, 32, 40, 48, 56, 60]
    assert lines[-1] == f"step 60/60  held-out {trainer.evaluations[-1][1]:.3f} bits/byte"


@pytest.mark.parametrize("changes", [{"dropout": 0.3}, {"dtype": "bfloat16", "recipe": "mxfp8"}])
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path, monkeypatch, changes):
    whole = trained(tmp_path / "whole", **changes)
    train_step = Trainer._train_step

    def interrupted(self):
        if self.step == 11:
            raise KeyboardInterrupt
        return train_step(self)

    monkeypatch.setattr(Trainer, "_train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "pieces", **changes)
    monkeypatch.undo()
    job, state = resumed(tmp_path / "pieces", changes)
    assert state["step"] == 10
    pieces = Trainer(job, LITTLE)
    pieces.load(state)
    train(pieces, tmp_path / "pieces", lambda line: None)
    assert pieces.losses == whole.losses
    assert pieces.evaluations == whole.evaluations
    assert all(torch.equal(a, b) for a, b in zip(pieces.model.parameters(), whole.model.parameters(), strict=True))


def test_only_steps_and_device_may_change(tmp_path):
    trained(tmp_path / "run")
    job, _ = resumed(tmp_path / "run", {"steps": 20, "device": "cpu", "seed": 0})
    assert job == job_of(TINY | {"steps": 20})
    for given, message in (({"experts": 8}, "made with --experts 4"), ({"steps": 3}, "has 16 steps already")):
        with pytest.raises(fm.InputError, match=message):
            resumed(tmp_path / "run", given)


def test_a_loss_or_gradient_that_is_not_finite_ends_the_run(tmp_path, monkeypatch):
    step = MasterAdamW.step
    monkeypatch.setattr(MasterAdamW, "step", lambda self, rate: step(self, rate) * math.inf)
    with pytest.raises(fm.InputError, match=r"--lr 0\.003: no finite loss"):
        trained(tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())


# The command, and several recipes


def test_every_forward_pass_is_under_the_recipe_of_the_job(tmp_path, monkeypatch):
    forward, seen = ByteTransformer.forward, set()

    def noted(self, bytes_BS):
        seen.add((self.training, settings.current().recipe.name))
        return forward(self, bytes_BS)

    monkeypatch.setattr(ByteTransformer, "forward", noted)
    monkeypatch.setattr(command, "load_split", lambda: LITTLE)
    monkeypatch.setattr(command, "SAMPLE_BYTES", 3)
    given = TINY | {"recipe": "mxfp8", "output": tmp_path / "run", "resume": False}
    assert command.run(Namespace(**given)) == 0
    assert settings.current() == settings.Settings()
    assert seen == {(True, "mxfp8"), (False, "mxfp8")}
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["job"]["recipe"] == "mxfp8"


def test_recipes_are_compared_with_everything_else_equal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "load_split", lambda: LITTLE)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    compare.main(["bf16,mxfp8", *options, "--output", str(tmp_path)])
    found = json.loads((tmp_path / "compare.json").read_text())
    plain, quantized = found["runs"]
    assert (found["baseline"], plain["gap_percent"]) == ("bf16", 0)
    ratio = quantized["held_out_bits_per_byte"] / plain["held_out_bits_per_byte"]
    assert quantized["gap_percent"] == pytest.approx((ratio - 1) * 100)
    assert 0 < abs(quantized["gap_percent"]) < 5
    assert plain["evaluations"] == [list(e) for e in trained(tmp_path / "alone").evaluations]
    assert f"| `mxfp8` | {quantized['held_out_bits_per_byte']:.3f} |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hidden": 30}, "--hidden 30: must be a multiple of 4"),
        ({"top_k": 9}, "--top-k 9: must be at most --experts 4"),
        ({"layers": 0}, "--layers 0: must be 1 or more"),
        ({"dropout": 1.0}, "--dropout 1.0"),
        ({"dtype": "float8"}, "--dtype float8"),
        ({"context": 10_000_000}, r"the held-out text allows at most \d+"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"device": "toaster"}, "choose cpu or cuda"),
    ],
)
def test_bad_values_are_named_with_what_is_possible(given, message):
    with pytest.raises(fm.InputError, match=message):
        Trainer(job_of(TINY | given), LITTLE)


def test_bigram_agrees_with_counting_in_plain_python():
    train, held_out = WHOLE.train.tolist(), WHOLE.held_out.tolist()
    pairs, firsts = Counter(pairwise(train)), Counter(train[:-1])
    total = 0.0
    for a, b in pairwise(held_out):
        total -= math.log2((pairs[a, b] + 0.05) / (firsts[a] + 256 * 0.05))
    bits = bigram_bits_per_byte(WHOLE.train, WHOLE.held_out)
    assert bits == pytest.approx(total / (len(held_out) - 1), rel=1e-12)
