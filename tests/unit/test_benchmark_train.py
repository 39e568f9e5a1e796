"""The benchmark of training: its code runs on a CPU, finds wrong losses, and its page has the figures of its files."""

import functools
import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.results import path
from benchmarks.train import models, page, recipes, run, text, variants
from benchmarks.train.steps import Job, moe_ms, train
from benchmarks.train.variants import OURS, STOCK, Variant, made

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers

CPU = torch.device("cpu")
SIZES = {"hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 32}
TINY = replace(
    models.MODELS[0],
    config=functools.partial(
        models.qwen3, 1, **SIZES, vocab_size=64, num_key_value_heads=1, head_dim=16, moe_intermediate_size=16,
        num_experts=4, num_experts_per_tok=2,
    ),
    length=16,
    micro_batches=2,
    std=0.2,
)  # fmt: skip
WORDS = 2000


@pytest.fixture
def job():
    torch.manual_seed(0)
    return Job.of_model(TINY, models.built(TINY, CPU), text.sequences(TINY.length, 64, WORDS))


def test_active_parameters_and_flops(job):
    attention = 32 * (2 * 16) * 2 + 32 * 16 * 2 + 2 * 16  # q and o; k and v; two norms
    experts = 3 * 32 * 16
    active = attention + 2 * experts + 4 * 32 + 3 * 32 + 64 * 32  # router, norms, head; no embedding
    assert models.active_parameters(job.model) == active
    assert models.flops_per_token(job.model, 16) == 6 * active + 3 * 2 * 16 * (16 + 16)


def test_steps_from_equal_weights_have_equal_losses(job):
    ready = made(Variant("ours", "fusedmoe", routers=True), job.model)
    first, again, other = (train(job, ready, 3, seed) for seed in (0, 0, 1))
    assert first.losses == again.losses != other.losses
    assert all(0 < update < step for update, step in zip(first.optimizer_ms, first.step_ms, strict=True))
    assert moe_ms(job, ready, repeats=1) > 0
    assert all(p.grad is None for p in job.model.parameters())


def test_a_whole_run_and_its_page(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDMOE_COMMIT", "abc123")
    chosen = [v for v in variants.VARIANTS if v.name in (STOCK, OURS, "SonicMoE", "stock, checkpointed")]
    without = replace(TINY, without=(("sonicmoe", "has no clamp"),))
    file = run.run([without], CPU, tmp_path, steps=4, rounds=2, sustained_s=0, variants=chosen, words=WORDS)
    assert file == path(tmp_path, "train")
    found = json.loads(file.read_text())
    (model,) = found["models"]
    assert (model["tokens"], model["steps"], model["commit"]) == (64, 2, "abc123")
    stock, ours, sonic, _ = model["variants"]
    assert sonic["note"] == "has no clamp"
    assert ours["losses"] == pytest.approx(stock["losses"], abs=0.02)
    assert stock["tokens_per_s"] == pytest.approx(64 / stock["step_ms"] * 1e3)
    assert min(stock["round_ms"]) <= stock["step_ms"] <= max(stock["round_ms"])
    shown = "\n".join(page.section(found))
    factor = ours["tokens_per_s"] / stock["tokens_per_s"]
    assert f"| {TINY.title} | {stock['tokens_per_s']:,.0f} |  | {ours['tokens_per_s']:,.0f} ({factor:.2f}x) |" in shown
    assert "Not measured: SonicMoE: has no clamp." in shown
    # the run of another model keeps the entry
    monkeypatch.setattr(run, "measure", lambda of, *_: {"name": of.name, "variants": []})
    run.run([replace(TINY, name="olmoe")], CPU, tmp_path)
    assert [entry["name"] for entry in json.loads(file.read_text())["models"]] == ["qwen3", "olmoe"]


def test_wrong_losses_and_errors_are_notes(monkeypatch):
    def wrong(variant, model):
        if variant.experts == "broken":
            raise RuntimeError("does not run\nhere")
        ready = made(variant, model)
        if variant.name == OURS:
            experts = ready.model.model.layers[0].mlp.experts
            experts.register_forward_hook(lambda module, args, y: 30 * y)
        return ready

    monkeypatch.setattr(run, "made", wrong)
    chosen = (Variant(STOCK, "grouped_mm"), Variant(OURS, "fusedmoe"), Variant("broken", "broken"))
    found = run.measure(TINY, CPU, chosen, steps=4, rounds=1, sustained_s=0, words=WORDS)
    stock, ours, broken = found["variants"]
    assert "tokens_per_s" in stock
    assert "tokens_per_s" not in ours
    assert ours["note"].startswith("AssertionError: losses [")
    assert broken["note"] == "RuntimeError: does not run"


def test_recipes_and_their_page(tmp_path):
    file = recipes.run(CPU, tmp_path, steps=3, seeds=(0, 1), recipes=("bf16", "fp8_block"), of=TINY, words=WORDS)
    found = json.loads(file.read_text())
    means = {(run["recipe"], run["seed"]): sum(run["losses"]) / 3 for run in found["runs"]}
    own, own_too = (means["fp8_block", seed] for seed in (0, 1))
    gaps = own - means["bf16", 0], own_too - means["bf16", 1]
    assert 0 < max(map(abs, gaps)) < 0.1
    row = f"| `fp8_block` | {own:.4f} | {own_too:.4f} | {gaps[0]:+.4f}, {gaps[1]:+.4f} | {sum(gaps) / 2:+.4f} |"
    assert row in page.losses(found)
