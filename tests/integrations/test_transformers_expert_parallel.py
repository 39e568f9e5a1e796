"""Models of transformers with fusedmoe's experts under transformers' expert parallelism, on two and four ranks.

Logits and gradients are those of the model with eager experts on one rank, in fp64.
"""

import sys
import warnings

import pytest
import torch
from torch import distributed as dist

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)
import transformers
from transformers.distributed import DistributedConfig

try:
    from transformers.distributed.expert_parallel import EPImplementationInterface
except ImportError:
    EPImplementationInterface = None

import fusedmoe as fm
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
TP, DP = {"tp_size": 2, "ep_size": 2}, {"fsdp_size": 2, "ep_size": 2}
if hasattr(DistributedConfig, "ep_size"):
    OURS = {"ep_implementation": "fusedmoe"}
    LAYOUTS = {  # with the engine that exchanges the tokens, if it is ours
        "all_reduce": (TP | {"ep_implementation": "all_reduce"}, None),
        "all_to_all": (TP | {"ep_implementation": "all_to_all"}, None),
        "data parallel": (DP | {"ep_implementation": "all_to_all"}, None),
    }
    EXCHANGES = {
        "slices": (TP | OURS, "allgather"),
        "batches": (DP | OURS, "allgather"),
        "slices of two batches": ({"tp_size": 2, "fsdp_size": 2, "ep_size": 4} | OURS, "alltoall"),
        "replicas": ({"fsdp_size": 4, "ep_size": 2} | OURS, "allgather"),
    }
    if EPImplementationInterface is not None:
        LAYOUTS |= EXCHANGES
else:  # such as 5.17, which always sums the parts of the ranks
    LAYOUTS = {"masked": ({"tp_size": 2, "enable_expert_parallel": True}, None)}


def batches(sizes):
    """The tokens of each rank: the same under tensor parallelism."""
    count = sizes.get("fsdp_size", 1)
    tokens = torch.randint(64, (count, 3, 9), generator=torch.Generator().manual_seed(0))
    return tokens.repeat_interleave(sizes.get("tp_size", 1), 0)


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def outcome(model, tokens):
    """Logits of the tokens and of one token alone, which leaves most slices empty, and the gradient of each
    parameter.
    """
    calls = tokens, tokens[:1, :1]
    logits = torch.cat([whole(model(input_ids=ids).logits).flatten(0, 1) for ids in calls])
    torch.nn.functional.cross_entropy(logits, torch.cat([ids.flatten() for ids in calls])).backward()
    return logits.detach(), {name: whole(p.grad) for name, p in model.named_parameters()}


def on_a_rank(rank, folder, sizes, experts="fusedmoe"):
    """Logits of this rank's tokens and gradients. Of each layer that fusedmoe ran, the number of experts and the engine
    that exchanged the tokens.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": dist.get_world_size()}.items():
            patch.setenv(name, str(value))
        fusedmoe_transformers.register()
        if EPImplementationInterface is not None:
            fusedmoe_transformers.register_expert_parallel()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, experts_implementation=experts, distributed_config=DistributedConfig(**sizes)
        )
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of the embedding, under tensor parallelism
        result = outcome(model, batches(sizes)[rank])
    ours = [m for m in model.modules() if expert_modules.OPS in vars(m)]
    experts = [(m.num_experts, engine_of(vars(m)[expert_modules.OPS].chain)) for m in ours]
    return *result, experts


def engine_of(chain):
    ranks = chain.dispatch.expert_parallel
    return None if ranks is None else ranks.engine.name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_are_the_eager_model(request, tmp_path, family, layout):
    sizes, engine = LAYOUTS[layout]
    given = batches(sizes)
    ranks = request.getfixturevalue({2: "ranks", 4: "four"}[len(given)])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), experts_implementation="eager").double()
    model.save_pretrained(tmp_path)
    wanted, gradients = zip(*[outcome(model, tokens) for tokens in given], strict=True)
    gradients = {name: g / len(given) for name, g in gradients[-1].items()}  # to which all calls have added
    if "fsdp_size" in sizes:  # FSDP2 of torch 2.13 divides the experts' fp64 gradients twice, of eager ones too
        theirs = sizes | {"ep_implementation": "all_to_all"}
        (_, eager, none), *_ = ranks.run(on_a_rank, str(tmp_path), theirs, "eager")
        assert not none
        for name, gradient in eager.items():
            if ".experts." in name:
                assert_close(gradient, gradient.norm() / gradients[name].norm() * gradients[name], name)
                gradients[name] = gradient
    found = ranks.run(on_a_rank, str(tmp_path), sizes)
    for logits, (got, got_gradients, experts) in zip(wanted, found, strict=True):
        assert experts == [(8 // sizes.get("ep_size", 2), engine)] * 2
        assert_close(got, logits)
        assert got_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert_close(got_gradients[name], gradient, name)


def assert_close(got, wanted, name="logits"):
    assert wanted.norm() > 1e-3, name
    assert (got - wanted).norm() < 1e-12 * wanted.norm(), name


# ---- settings and refusals ------------------------------------------------------------------------------------------

needs_registry = pytest.mark.skipif(
    EPImplementationInterface is None, reason="transformers has no registry of expert parallelism"
)
SETTINGS = {
    "max_tokens": 50, "capacity": 2.0, "overflow": "drop", "combine_dtype": torch.float32,
    "dispatch_dtype": torch.float8_e4m3fn, "timeout_s": 5.0,
}  # fmt: skip


def experts_with(name, mesh, same=None):
    """A model, and its modules of experts, each with the exchange of an implementation."""
    fusedmoe_transformers.register()
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES["qwen3_moe"](), experts_implementation="fusedmoe")
    modules = [layer.mlp.experts for layer in model.model.layers]
    return model, [(experts, EPImplementationInterface()[name](experts, mesh, same or mesh)) for experts in modules]


@needs_registry
def test_all_layers_share_the_ranks_with_the_settings(mesh):
    fusedmoe_transformers.register_expert_parallel("ours", "allgather", **SETTINGS)
    model, layers = experts_with("ours", mesh)
    ranks = fusedmoe_transformers.expert_parallel_of(model)
    assert all(vars(experts)[expert_modules.RANKS] is ranks for experts, _ in layers)
    assert {name: getattr(ranks, name) for name in SETTINGS} == SETTINGS
    assert ranks.engine_name == "allgather"
    fusedmoe_transformers.register_expert_parallel("ours", "alltoall")
    assert fusedmoe_transformers.expert_parallel_of(experts_with("ours", mesh)[0]).engine_name == "alltoall"
    assert fusedmoe_transformers.expert_parallel_of(torch.nn.Linear(1, 1)) is None


@needs_registry
def test_explain_shows_the_exchange(ranks):
    for text in ranks.run(explained):
        assert "2 ranks" in text
        assert "GatherTokens" in text


def explained(rank):
    fusedmoe_transformers.register_expert_parallel("ours", max_tokens=64)
    _, [(experts, _), _] = experts_with("ours", dist.init_device_mesh("cpu", (2,)))
    experts.num_experts //= 2  # as transformers shards them
    for parameter in experts.parameters():
        parameter.data = parameter.data[:4]
    return str(fusedmoe_transformers.explain(experts, tokens=32))


@needs_registry
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda experts: setattr(experts.config, "_experts_implementation", "eager"), "experts_implementation='eager'"),
        (lambda experts: experts.bfloat16().to(torch.float8_e5m2).requires_grad_(False), "'all_to_all'"),
    ],
)
def test_experts_that_run_elsewhere_are_refused(mesh, changed, message):
    fusedmoe_transformers.register_expert_parallel()
    _, [(experts, exchange), _] = experts_with("fusedmoe", mesh)
    x, index = torch.randn(5, 32), torch.randint(8, (5, 2))
    assert exchange(x, index, torch.ones(5, 2)).norm() > 1e-3
    changed(experts)
    with pytest.raises(fm.InputError, match=message):
        exchange(x, index, torch.ones(5, 2))


@needs_registry
def test_ranks_with_the_same_tokens_share_the_experts(ranks):
    assert all("multiple of tp_size" in message for message in ranks.run(refused))


def refused(rank):
    fusedmoe_transformers.register_expert_parallel()
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep", "tp"))
    with pytest.raises(fm.InputError) as error:
        experts_with("fusedmoe", mesh["ep"], mesh["tp"])
    return str(error.value)


def test_a_transformers_without_a_registry(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    monkeypatch.delitem(sys.modules, "fusedmoe.integrations.transformers.expert_parallel", raising=False)
    monkeypatch.delattr(fusedmoe_transformers, "expert_parallel", raising=False)
    with pytest.raises(ImportError, match=r"such as 5\.24: pip install 'fusedmoe\[transformers\]'"):
        fusedmoe_transformers.register_expert_parallel()
