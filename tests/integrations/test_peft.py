"""peft's LoRA on the experts' stacked weights, under ``experts_implementation="fusedmoe"``."""

import importlib.util
import warnings

import pytest
import torch
from kit import moe_families

import fusedmoe as fm
import fusedmoe.integrations.transformers as fusedmoe_transformers

FAMILIES = ["olmoe", "qwen3_moe", "gpt_oss"]  # the last with biases, and weights that are stored (E, in, out)
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

# peft asks a model for what transformers has another name for by now
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),  # peft 0.18, of any module but its own
]


@pytest.fixture(scope="module")
def peft():
    fusedmoe_transformers.register()
    find = importlib.util.find_spec
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # of Transformer Engine there may be the recipes alone, which peft takes for all of it
        absent = "transformer_engine"
        patch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == absent else find(name, *args))
        warnings.simplefilter("ignore")
        return pytest.importorskip("peft")


def adapted(peft, family, dtype=torch.float64, targets=BOTH):
    """A tiny model with LoRA on its experts, drawn: with B at zero the update would be nothing."""
    tiny = moe_families.tiny(family, "eager", dtype)
    tiny.model = peft.get_peft_model(tiny.model, peft.LoraConfig(r=4, lora_alpha=8, target_parameters=targets))
    torch.manual_seed(1)
    trained = {name: p for name, p in tiny.model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * len(targets) * len(tiny.experts)
    for name, parameter in trained.items():
        assert ".experts." in name
        assert "lora_" in name
        torch.nn.init.normal_(parameter, std=0.2)
    return tiny, trained


def use(tiny, implementation):
    tiny.model.set_experts_implementation(implementation)


def results(tiny, trained):
    logits, loss = moe_families.logits_and_loss(tiny)
    grads = torch.autograd.grad(loss, [*trained.values()])
    return {"logits": logits.detach(), "loss": loss.detach(), **dict(zip(trained, grads, strict=True))}


@pytest.fixture
def calls(monkeypatch):
    """The experts' chains that this package was called for."""
    chains, run = [], fm.Sequential.forward_with

    def noted(self, *args, **kwargs):
        chains.append(self)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(fm.Sequential, "forward_with", noted)
    return chains


@pytest.mark.parametrize("targets", [BOTH, BOTH[:1], BOTH[1:]], ids=["both", "gate_up", "down"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_logits_loss_and_gradients_as_eager(peft, calls, family, dtype, targets):
    tiny, trained = adapted(peft, family, dtype, targets)
    expected = results(tiny, trained)
    assert not calls
    use(tiny, "fusedmoe")
    got = results(tiny, trained)
    assert len(calls) == len(tiny.experts)
    results(tiny, trained)
    assert len(set(map(id, calls))) == len(tiny.experts)  # made once, though peft brings new classes with every call
    for name, want in expected.items():
        assert want.norm() > 0
        error = (got[name] - want).norm() / want.norm()
        assert error < {torch.float64: 1e-13, torch.float32: 2e-5}[dtype], name
    with tiny.model.disable_adapter():
        without = moe_families.logits_and_loss(tiny)[0]
    assert (without - expected["logits"]).norm() > 1e-3 * without.norm()  # the update is seen


def test_training_is_that_of_eager_and_trains(peft):
    losses = {}
    for implementation in ("eager", "fusedmoe"):
        tiny, trained = adapted(peft, "olmoe")
        use(tiny, implementation)
        before = {n: p.detach().clone() for n, p in tiny.model.named_parameters() if n not in trained}
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
        losses[implementation] = []
        for _ in range(6):
            optimizer.zero_grad()
            _, loss = moe_families.logits_and_loss(tiny)
            loss.backward()
            optimizer.step()
            losses[implementation].append(loss.item())
        assert all(torch.equal(p, before[n]) for n, p in tiny.model.named_parameters() if n in before)
    assert losses["fusedmoe"] == pytest.approx(losses["eager"], rel=1e-9)
    assert losses["fusedmoe"][-1] < 0.95 * losses["fusedmoe"][0]


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_and_unloaded_it_computes_the_same(peft, calls, family):
    tiny, _ = adapted(peft, family)
    use(tiny, "fusedmoe")
    with torch.no_grad():
        expected, _ = moe_families.logits_and_loss(tiny)
        tiny.model = tiny.model.merge_and_unload()
        assert not any("lora" in name for name, _ in tiny.model.named_parameters())
        got, _ = moe_families.logits_and_loss(tiny)
    assert len(calls) == 2 * len(tiny.experts)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


def test_quantized_weights_are_kept_only_while_no_adapter_is_active(peft):
    """With an adapter, a weight is computed in each call. peft merges through ``.data``, which torch does not count."""
    tiny, trained = adapted(peft, "qwen3_moe", torch.float32)
    use(tiny, "fusedmoe")

    def logits():
        with torch.no_grad(), fm.recipe("mxfp8"):
            return moe_families.logits_and_loss(tiny)[0]

    adapted_logits = logits()
    assert fm.weight_cache_bytes(tiny.model) == 0
    with tiny.model.disable_adapter():
        base = logits()
        assert fm.weight_cache_bytes(tiny.model) > 0
        assert torch.equal(logits(), base)
    assert torch.equal(logits(), adapted_logits)
    assert fm.weight_cache_bytes(tiny.model) == 0
    with fm.recipe("mxfp8"):
        results(tiny, trained)
    with tiny.model.disable_adapter():
        assert torch.equal(logits(), base)
    tiny.model.merge_adapter()
    fm.clear_weight_cache(tiny.model)  # docs/recipes.md says so
    torch.testing.assert_close(logits(), adapted_logits, rtol=1e-3, atol=1e-3)
