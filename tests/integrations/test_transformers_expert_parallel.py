"""Models of transformers with fusedmoe's experts under transformers' expert parallelism, on two ranks.

Logits and gradients are those of the model with eager experts on one rank, in fp64.
"""

import pytest
import torch
from torch import distributed as dist

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)
import transformers
from transformers.distributed import DistributedConfig

import fusedmoe.integrations.transformers as fusedmoe_transformers
from fusedmoe.integrations.transformers import expert_modules

pytestmark = pytest.mark.distributed

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2, "pad_token_id": 0,
    "initializer_range": 0.3, "use_cache": False,
}  # fmt: skip
FAMILIES = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(num_experts=8, **SIZES),
    "gpt_oss": lambda: transformers.GptOssConfig(num_local_experts=8, layer_types=["full_attention"] * 2, **SIZES),
}
if hasattr(DistributedConfig, "ep_size"):
    LAYOUTS = {
        "all_reduce": {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"},
        "all_to_all": {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_to_all"},
        "data parallel": {"fsdp_size": 2, "ep_size": 2, "ep_implementation": "all_to_all"},
    }
    if "ep_implementation" in DistributedConfig.__dataclass_fields__:
        LAYOUTS |= {
            "exchange of slices": {"tp_size": 2, "ep_size": 2, "ep_implementation": "fusedmoe"},
            "exchange of batches": {"fsdp_size": 2, "ep_size": 2, "ep_implementation": "fusedmoe"},
        }
else:  # such as 5.17, which always sums the parts of the ranks
    LAYOUTS = {"masked": {"tp_size": 2, "enable_expert_parallel": True}}


def batches(layout):
    """The tokens of each rank: the same under tensor parallelism."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randint(64, (2, 3, 9), generator=generator)
    return (first, first) if "tp_size" in LAYOUTS[layout] else (first, second)


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def outcome(model, tokens):
    """Logits, and the gradient of each parameter."""
    logits = whole(model(input_ids=tokens).logits)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    return logits.detach(), {name: whole(p.grad) for name, p in model.named_parameters()}


def on_a_rank(rank, folder, layout, experts="fusedmoe"):
    """Logits of this rank's tokens, gradients, and the number of experts of each layer that fusedmoe ran."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}.items():
            patch.setenv(name, str(value))
        fusedmoe_transformers.register()
        fusedmoe_transformers.register_expert_parallel()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, experts_implementation=experts,
            distributed_config=DistributedConfig(**LAYOUTS[layout]),
        )  # fmt: skip
        result = outcome(model, batches(layout)[rank])
    return *result, [m.num_experts for m in model.modules() if expert_modules.OPS in vars(m)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_are_the_eager_model(ranks, tmp_path, family, layout):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), experts_implementation="eager").double()
    model.save_pretrained(tmp_path)
    wanted, gradients = zip(*[outcome(model, tokens) for tokens in batches(layout)], strict=True)
    gradients = {name: g / 2 for name, g in gradients[-1].items()}  # which both calls have added to
    if "fsdp_size" in LAYOUTS[layout]:  # FSDP2 of torch 2.13 halves the experts' fp64 gradients twice, of eager ones too
        (_, eager, none), _ = ranks.run(on_a_rank, str(tmp_path), "data parallel", "eager")
        assert not none
        gradients |= {name: g for name, g in eager.items() if ".experts." in name}
    found = ranks.run(on_a_rank, str(tmp_path), layout)
    for logits, (got, got_gradients, experts) in zip(wanted, found, strict=True):
        assert experts == [4, 4]
        assert_close(got, logits)
        assert got_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert_close(got_gradients[name], gradient, name)


def assert_close(got, wanted, name="logits"):
    assert wanted.norm() > 1e-3, name
    assert (got - wanted).norm() < 1e-12 * wanted.norm(), name
