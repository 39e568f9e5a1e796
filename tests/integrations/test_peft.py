"""peft's LoRA on the experts' stacked weights, under ``experts_implementation="fusedmoe"``."""

import pytest
import torch
from kit import moe_families
from kit.compare import assert_bitwise
from kit.moe_families import logits

import fusedmoe as fm

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

pytestmark = [
    pytest.mark.usefixtures("registered"),
    # peft asks a model for what transformers has another name for by now
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),  # peft 0.18, of any module but its own
]


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
    return tiny


CASES = [
    ("olmoe", torch.float64, BOTH[1:]), ("qwen3_moe", torch.float64, BOTH), ("gpt_oss", torch.float64, BOTH),
    ("gpt_oss", torch.float32, BOTH[:1]),
]  # fmt: skip


@pytest.mark.parametrize(("family", "dtype", "targets"), CASES)
def test_the_same_logits_loss_and_gradients_as_eager(peft, chains_called, family, dtype, targets):
    tiny = adapted(peft, family, dtype, targets)
    expected = moe_families.step(tiny)
    assert len(expected) == 2 + 2 * len(targets) * len(tiny.experts)
    assert not chains_called
    tiny.model.set_experts_implementation("fusedmoe")
    got = moe_families.step(tiny)
    assert len(chains_called) == len(tiny.experts)
    merged = [logits(tiny)]
    # made once, though peft brings new classes with every call
    assert len(set(map(id, chains_called))) == len(tiny.experts)
    tolerance = {torch.float64: 1e-11, torch.float32: 2e-5}[dtype]
    for name, want in expected.items():
        assert want.norm() > 0
        assert (got[name] - want).norm() < tolerance * want.norm(), name
    with tiny.model.disable_adapter():
        without = logits(tiny)
    assert (without - expected["logits"]).norm() > 1e-3 * without.norm()  # the update is seen
    tiny.model = tiny.model.merge_and_unload()
    assert not any("lora" in name for name, _ in tiny.model.named_parameters())
    chains_called.clear()
    merged.append(logits(tiny))
    assert len(chains_called) == len(tiny.experts)
    assert (merged[0] - merged[1]).norm() < tolerance * merged[0].norm()


def test_quantized_weights_are_kept_only_while_no_adapter_is_active(peft):
    """With an adapter, a weight is computed in each call. peft merges through ``.data``, which torch does not count."""
    tiny = adapted(peft, "qwen3_moe", torch.float32)
    tiny.model.set_experts_implementation("fusedmoe")
    with fm.recipe("mxfp8"):
        adapted_logits = logits(tiny)
        assert fm.weight_cache_bytes(tiny.model) == 0
        with tiny.model.disable_adapter():
            base = logits(tiny)
            assert fm.weight_cache_bytes(tiny.model) > 0
            assert_bitwise(logits(tiny), base)
        assert_bitwise(logits(tiny), adapted_logits)
        assert fm.weight_cache_bytes(tiny.model) == 0
        moe_families.step(tiny)
        with tiny.model.disable_adapter():
            assert_bitwise(logits(tiny), base)
        tiny.model.merge_adapter()
        fm.clear_weight_cache(tiny.model)  # docs/recipes.md says so
        torch.testing.assert_close(logits(tiny), adapted_logits, rtol=1e-3, atol=1e-3)
