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
    batches,
    bigram_bits_per_byte,
    chunks_of,
    load_split,
    unique_paragraphs,
    windows,
)
from fusedmoe.commands.demo.model import ByteTransformer, rope_tables, rotate
from fusedmoe.commands.demo.options import CPU_DEFAULTS, GPU_DEFAULTS, Job, job_of
from fusedmoe.commands.demo.train import (
    BETAS,
    WEIGHT_DECAY,
    MasterAdamW,
    Trainer,
    bits_per_byte,
    learning_rate,
    resumed,
    train,
)

TINY = {
    "layers": 1, "hidden": 32, "heads": 2, "experts": 4, "top_k": 2, "intermediate": 32, "context": 10, "batch": 4,
    "steps": 16, "device": "cpu", "dtype": "float32",
}  # fmt: skip
WHOLE = load_split()
LITTLE = Split(train=WHOLE.train[:50_000], held_out=WHOLE.held_out[:500])
TEXT = torch.arange(200, dtype=torch.uint8)


# The text


def paragraphs_of(text):
    paragraphs = bytes(text.tolist()).decode().split("\n\n")
    return {" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip()}


def test_paragraphs_are_kept_once_in_the_order_of_pages_and_chunks_are_whole_paragraphs():
    pages = {"b": "two\n\none  more\n", "a": "one\nmore\n\n\n\n   indented\n"}
    assert unique_paragraphs(pages) == ["one\nmore", "   indented", "two"]
    chunks = chunks_of(["a" * 10, "b" * 10, "ü" * 30, "d"], chunk_bytes=20)
    assert chunks == [b"a" * 10 + b"\n\n" + b"b" * 10 + b"\n\n", "ü".encode() * 30 + b"\n\n", b"d\n\n"]


def test_a_tenth_of_the_distinct_paragraphs_is_held_out():
    from pydoc_data.topics import topics

    train, held_out = paragraphs_of(WHOLE.train), paragraphs_of(WHOLE.held_out)
    assert len(held_out) > 100
    assert not train & held_out
    everything = {" ".join(p.split()) for page in topics.values() for p in page.split("\n\n") if p.strip()}
    assert train | held_out == everything
    assert len(WHOLE.held_out) / (len(WHOLE.held_out) + len(WHOLE.train)) == pytest.approx(0.1, abs=0.02)
    again = load_split(dict(reversed(list(topics.items()))))
    assert torch.equal(WHOLE.train, again.train)
    assert torch.equal(WHOLE.held_out, again.held_out)


def test_targets_are_the_inputs_one_byte_on():
    inputs, targets = windows(TEXT, torch.tensor([0, 7, 183]), 16)
    assert inputs.shape == targets.shape == (3, 16)
    assert torch.equal(inputs + 1, targets)
    assert inputs[:, 0].tolist() == [0, 7, 183]
    assert inputs.dtype == targets.dtype == torch.int64


def test_batches_depend_on_the_seed_and_are_a_prefix_of_those_of_more_steps():
    job = {"device": "cpu", "steps": 7, "batch": 64, "context": 8}
    starts = batches(TEXT[:12], job_of(job))
    assert set(starts.flatten().tolist()) == {0, 1, 2, 3}
    assert torch.equal(starts, batches(TEXT[:12], job_of(job | {"steps": 50}))[:7])
    assert not torch.equal(starts, batches(TEXT[:12], job_of(job | {"seed": 1})))


def test_bigram_agrees_with_counting_in_plain_python():
    train, held_out = WHOLE.train.tolist(), WHOLE.held_out.tolist()
    pairs, firsts = Counter(pairwise(train)), Counter(train[:-1])
    total = 0.0
    for a, b in pairwise(held_out):
        total -= math.log2((pairs[a, b] + 0.05) / (firsts[a] + 256 * 0.05))
    bits = bigram_bits_per_byte(WHOLE.train, WHOLE.held_out)
    assert bits == pytest.approx(total / (len(held_out) - 1), rel=1e-12)
    best = min(bigram_bits_per_byte(WHOLE.train, WHOLE.held_out, s) for s in (0.3, 0.1, 0.03, 0.01))
    assert bits < best + 0.005, "about as low as a bigram model can be"


# The model


SIZES = TINY | {"layers": 2, "hidden": 16, "intermediate": 8, "context": 12}


def model_of(**changes):
    torch.manual_seed(0)
    return ByteTransformer(job_of(SIZES | changes))


def with_all_weights_random(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def test_every_parameter_gets_a_gradient():
    model = model_of()
    logits, stats = model(torch.randint(256, (3, 12)))
    assert logits.shape == (3, 12, 256)
    assert [int(layer.load.sum()) for layer in stats] == [3 * 12 * 2] * 2  # each token goes to two experts per layer
    losses = sum(layer.load_balancing_loss + layer.z_loss for layer in stats)
    (logits.logsumexp(-1).sum() + losses).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert {p.dtype for p in model_of(dtype="bfloat16").parameters()} == {torch.bfloat16}


def test_a_later_byte_changes_nothing_before_it():
    model = with_all_weights_random(model_of()).eval()
    text = torch.randint(256, (1, 12))
    changed = text.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    with torch.no_grad():
        before, after = model(text)[0], model(changed)[0]
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert all((before[0, i] - after[0, i]).abs().max() > 1e-3 for i in range(7, 12))  # and much from it on


def test_attention_scores_depend_on_distance_alone():
    cos, sin = rope_tables(32, 8, torch.device("cpu"))
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    rotated_q, rotated_k = rotate(q.expand(32, 8), cos, sin), rotate(k.expand(32, 8), cos, sin)
    scores = rotated_q @ rotated_k.T
    for distance in (-5, 0, 9):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)
    assert (scores[0, 0] - scores[0, 9]).abs() > 1e-2
    torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm().expand(32))


def test_parameter_counts():
    embedding, norms = 256 * 16, 16 * (1 + 2 * 2)
    attention, router, expert = 4 * 16 * 16, 4 * 16, 3 * 16 * 8
    total, active = model_of().parameter_counts()
    assert total == embedding + norms + 2 * (attention + router + 4 * expert)
    assert active == embedding + norms + 2 * (attention + router + 2 * expert)


def test_dropout_is_for_training_alone():
    model = with_all_weights_random(model_of(dropout=0.5))
    text = torch.randint(256, (1, 12))
    with torch.no_grad():
        assert not torch.equal(model(text)[0], model(text)[0])
        model.eval()
        assert torch.equal(model(text)[0], model(text)[0])


# The optimizer


def gradients_into(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def test_learning_rate_warms_up_peaks_and_falls_to_a_twentieth():
    rates = [learning_rate(step, 100, 2.0) for step in range(100)]
    assert rates[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert max(rates) == 2.0
    assert all(later < earlier for earlier, later in pairwise(rates[5:]))
    assert rates[-1] == pytest.approx(0.1, rel=0.05)
    assert learning_rate(0, 1, 2.0) == 2.0


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
    assert model.weight.grad is None


def test_a_long_gradient_is_clipped_and_its_norm_returned():
    model = nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.tensor([[30.0]])
    optimizer = MasterAdamW(model)
    assert float(optimizer.step(0.0)) == 30.0
    moment = optimizer.state_dict()["adamw"]["state"][0]["exp_avg"]
    torch.testing.assert_close(moment, torch.tensor([[1 - BETAS[0]]]))


def test_updates_too_small_for_a_bfloat16_weight_add_up():
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = MasterAdamW(model)
    for _ in range(20):
        model.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
        optimizer.step(1e-3)  # an eighth of what bfloat16 can tell from 1
    assert model.weight.item() == pytest.approx(0.98, abs=4e-3)


# Evaluation and sample


@pytest.fixture
def model():
    torch.manual_seed(0)
    return with_all_weights_random(ByteTransformer(job_of(TINY | {"dropout": 0.5})))


@pytest.mark.parametrize("length", [2, 10, 11, 12, 95])
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
    assert text.startswith(b"The ")
    assert len(text) == 34
    assert printable(b"a\x1b[31mb\r\tc\x00\nd \xc3\xbc \xff\xe2\x80\xae") == "a�[31mb��c�\nd ü ��"
    assert "Below the bigram model by 1.500" in verdict(2.0, 3.5)
    assert "NOT below" in verdict(3.5, 3.5)


# The loop


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
    assert 30 <= len(lines) <= 45
    assert lines[-1] == f"step 60/60  held-out {trainer.evaluations[-1][1]:.3f} bits/byte"


@pytest.mark.parametrize("changes", [{}, {"dropout": 0.3}, {"dtype": "bfloat16", "recipe": "mxfp8"}])
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
    for given, message in (
        ({"experts": 8}, "--experts 8: the checkpoint was made with --experts 4"),
        ({"steps": 3}, "--steps 3: the checkpoint has 16 steps already"),
    ):
        with pytest.raises(fm.InputError, match=message):
            resumed(tmp_path / "run", given)


def test_a_loss_or_gradient_that_is_not_finite_ends_the_run(tmp_path, monkeypatch):
    step = MasterAdamW.step
    monkeypatch.setattr(MasterAdamW, "step", lambda self, rate: step(self, rate) * math.inf)
    with pytest.raises(fm.InputError, match=r"--lr 0\.003: no finite loss up to step 1; choose a lower one"):
        trained(tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())


# The command, and several recipes


def test_every_forward_pass_is_under_the_recipe_of_the_job(tmp_path, monkeypatch, capsys):
    forward, seen = ByteTransformer.forward, []

    def noted(self, bytes_BS):
        seen.append((self.training, len(bytes_BS), settings.current().recipe.name))
        return forward(self, bytes_BS)

    monkeypatch.setattr(ByteTransformer, "forward", noted)
    monkeypatch.setattr(command, "load_split", lambda: LITTLE)
    monkeypatch.setattr(command, "SAMPLE_BYTES", 3)
    given = TINY | {"recipe": "mxfp8", "output": tmp_path / "run", "resume": False}
    assert command.run(Namespace(**given)) == 0
    assert settings.current() == settings.Settings()
    assert {recipe for *_, recipe in seen} == {"mxfp8"}
    assert [training for training, *_ in seen].count(True) == TINY["steps"]
    assert "float32, recipe mxfp8, seed 0" in capsys.readouterr().out
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["job"]["recipe"] == "mxfp8"
    assert results["held_out_bits_per_byte"] == results["evaluations"][-1][1]


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
    assert compare.draw([found], tmp_path).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hidden": 30}, r"--hidden 30: must be a multiple of 4"),
        ({"top_k": 9}, r"--top-k 9: must be at most --experts 4"),
        ({"layers": 0}, r"--layers 0: must be 1 or more"),
        ({"context": 10_000_000}, r"--context 10000000: the held-out text allows at most \d+"),
        ({"lr": float("nan")}, r"--lr nan"),
        ({"lr": -1.0}, r"--lr -1\.0: must be more than 0"),
        ({"dropout": 1.0}, r"--dropout 1\.0"),
        ({"seed": -1}, r"--seed -1"),
        ({"dtype": "float8"}, r"--dtype float8: choose from float32, bfloat16"),
        ({"device": "toaster"}, r"--device toaster: choose cpu or cuda"),
        ({"recipe": "fp3"}, r"--recipe fp3: choose from bf16, "),
    ],
)
def test_bad_values_are_named_with_what_is_possible(given, message):
    with pytest.raises(fm.InputError, match=message):
        Trainer(job_of(TINY | given), LITTLE)


def test_defaults_are_complete_and_good_on_both_devices():
    Job(**CPU_DEFAULTS, device="cpu").check()
    Job(**GPU_DEFAULTS, device="cpu").check()
