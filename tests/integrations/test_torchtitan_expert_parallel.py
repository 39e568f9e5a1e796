"""Layers of torchtitan on two ranks that share the experts: they are one rank with all tokens and exact experts.

With torchtitan's dispatcher and our experts (the override `experts`), and with our exchange too (`routed_experts`).
"""

import importlib
import warnings

import pytest
import torch
from kit.framework_oracle import loop, swiglu
from kit.rounding import relative_error
from test_torchtitan import imported
from torch import distributed as dist

import fusedmoe as fm

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")  # torchtitan's router asks for fp32

OURS = {
    "experts": "fusedmoe.integrations.torchtitan.experts",
    "routed_experts": "fusedmoe.integrations.torchtitan_routed.routed_experts",
}
DIM, HIDDEN_DIM, EXPERTS, TOP_K, LIMIT = 32, 16, 4, 2, 0.5
SHAPE = (2, 9, DIM)  # of the tokens of one rank
CLOSE = 0.02  # in bf16: GPT-OSS's limit makes it more than 0.01
KINDS = pytest.mark.parametrize("kind", ["GroupedExperts", "GptOssGroupedExperts"])


def layer_config(kind, dispatcher, override=None, balanced=False, **settings):
    """A layer of torchtitan, with experts that are sharded if there is a mesh axis "ep"."""
    moe, dispatchers = (imported(f"torchtitan.models.common.{name}") for name in ("moe", "token_dispatcher"))
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config

    sizes = {"dim": DIM, "hidden_dim": HIDDEN_DIM, "num_experts": EXPERTS}
    if kind == "GroupedExperts":
        experts, names = moe.GroupedExperts.Config(**sizes), ("w1_EFD", "w2_EDF", "w3_EFD")
    else:
        experts = imported("torchtitan.models.gpt_oss.moe").GptOssGroupedExperts.Config(**sizes, swiglu_limit=LIMIT)
        names = "mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED"
    gate = moe.Linear.Config(in_features=DIM, out_features=EXPERTS)
    routing = {"num_experts": EXPERTS, "top_k": TOP_K}
    config = moe.MoE.Config(
        num_experts=EXPERTS,
        load_balance_coeff=None,
        router=moe.TokenChoiceTopKRouter.Config(**routing, gate=gate, _debug_force_load_balance=balanced),
        routed_experts=moe.RoutedExperts.Config(
            inner_experts=experts, token_dispatcher=getattr(dispatchers, dispatcher).Config(**routing)
        ),
    )
    set_moe_sharding_config(config, enable_ep=True, enable_sp=False, expert_param_layout=dict.fromkeys(names))
    if override is not None:
        assert len(apply_overrides(OverrideConfig(imports=[(OURS[override], settings)]), config)) == 1
    return config


def filled(layer):
    """The layer with values that bf16 holds exactly."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(layer.named_parameters()):
            parameter.copy_((0.3 * torch.randn(parameter.shape, generator=generator)).bfloat16())
    return layer


def batch(rank):
    generator = torch.Generator().manual_seed(rank)
    x, dy = torch.randn(2, *SHAPE, generator=generator).bfloat16().float()
    return x, dy


def with_exact_experts(kind, balanced=False):
    """torchtitan's layer on one rank, whose experts are a loop in fp64."""
    layer = filled(layer_config(kind, "LocalTokenDispatcher", balanced=balanced).build())
    experts = layer.routed_experts.inner_experts
    p = {name: parameter.double() for name, parameter in experts.named_parameters()}

    def plain(e, r):
        return swiglu(r @ p["w1_EFD"][e].T, r @ p["w3_EFD"][e].T) @ p["w2_EDF"][e].T

    def gpt_oss(e, r):
        both = r @ p["mlp1_weight_EGD"][e].T + p["mlp1_bias_EG"][e]
        hidden = swiglu(both[:, ::2], both[:, 1::2], LIMIT, 1.702, 1.0)
        return hidden @ p["mlp2_weight_EDF"][e].T + p["mlp2_bias_ED"][e]

    expert = plain if kind == "GroupedExperts" else gpt_oss
    experts.forward = lambda x_RD, counts_E: loop(x_RD.double(), counts_E.tolist(), expert).float()
    return layer


def outcome(layer, x, dy):
    """Output, gradient of the tokens, and gradients of the parameters: those of this rank."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return y.detach(), x.grad, {n: g.to_local() if hasattr(g, "to_local") else g for n, g in grads.items()}


def steps_of(layer):
    """The ops that `fm.explain` plans, of one group of modules."""
    (group,) = fm.explain(layer, tokens=18).groups
    assert group.explanation is not None, group.note
    return group.kind, {op.rpartition(".")[2] for step in group.explanation.steps for op in step.ops}


def on_a_rank(rank, backend, kind, override, balanced, settings):
    parallel_dims = imported("torchtitan.distributed.parallel_dims")
    from torchtitan.distributed import utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_dims, "device_type", "cpu")
        patch.setattr(utils, "_spmd_backend", backend)
        warnings.filterwarnings("ignore", "In CPU autocast")
        sizes = {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "pp": 1, "ep": 2, "world_size": 2}
        dims = parallel_dims.ParallelDims(**sizes, spmd_backend=backend)
        config = layer_config(kind, "AllToAllTokenDispatcher", override, balanced, **settings)
        layer, other = filled(config.build()), config.build()
        layer.parallelize(dims)
        other.parallelize(dims)
        with utils.get_spmd_context(parallel_dims=dims)():
            found = outcome(layer, *batch(rank))
            steps = steps_of(layer)
    shared = [getattr(one.routed_experts, "expert_parallel", None) for one in (layer, other)]
    assert shared[0] is shared[1]
    return *found, steps, str(shared[0])


@pytest.mark.distributed
@pytest.mark.parametrize(("override", "backend", "settings"), [
    ("experts", "partial_dtensor", {}), ("experts", "spmd_types", {}),
    ("routed_experts", "partial_dtensor", {"max_tokens": 20}), ("routed_experts", "spmd_types", {}),
])  # fmt: skip
@KINDS
def test_two_ranks_share_the_experts(ranks, kind, override, backend, settings):
    # gloo has no uneven exchange for torchtitan's dispatcher with this backend
    balanced = (override, backend) == ("experts", "spmd_types")
    x, dy = (torch.cat(both) for both in zip(batch(0), batch(1), strict=True))
    y, dx, gradients = outcome(with_exact_experts(kind, balanced), x, dy)
    first, second = ranks.run(on_a_rank, backend, kind, override, balanced, settings)
    assert relative_error(torch.cat([first[0], second[0]]), y.double()) < CLOSE
    assert relative_error(torch.cat([first[1], second[1]]), dx.double()) < CLOSE
    for name, gradient in gradients.items():
        parts = first[2][name], second[2][name]
        got = torch.cat(parts) if "inner_experts" in name else sum(parts)
        assert relative_error(got, gradient.double()) < CLOSE, name
    (module, ops), exchange = first[3:]
    if override == "experts":
        assert (module, exchange) == (f"Fused{kind}", "None")
        assert "GatherTokens" not in ops
    else:
        assert module == "FusedRoutedExperts"
        assert {"GatherTokens", "ReturnTokens", "GroupedLinear", "DGatherTokens"} <= ops
        assert exchange.startswith("ExpertParallel(rank 0 of 2")
        assert exchange.endswith("max_tokens=20)") is bool(settings)


@KINDS
def test_one_rank(kind):
    """Without a mesh, and so without an exchange."""
    own = filled(layer_config(kind, "AllToAllTokenDispatcher").build())
    layer = layer_config(kind, "AllToAllTokenDispatcher", "routed_experts").build()
    layer.load_state_dict(own.state_dict())
    y, dx, gradients = outcome(with_exact_experts(kind), *batch(0))
    got_y, got_dx, got = outcome(layer, *batch(0))
    assert relative_error(got_y, y.double()) < CLOSE
    assert relative_error(got_dx, dx.double()) < CLOSE
    assert got.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert relative_error(got[name], gradient.double()) < CLOSE, name
    module, ops = steps_of(layer)
    assert module == "FusedRoutedExperts"
    assert {"Dispatch", "Combine"} <= ops
    assert not {"GatherTokens", "ReturnTokens"} & ops
    assert ("Scale" in ops) is (kind == "GroupedExperts")  # a bias is scaled by the combine
    assert "the model's own router, TokenChoiceTopKRouter" in str(fm.explain(layer))


def test_settings_of_the_override():
    with fm.recipe("mxfp8"):
        want = filled(layer_config("GroupedExperts", "LocalTokenDispatcher", "routed_experts").build())(batch(0)[0])
    layer = filled(layer_config("GroupedExperts", "LocalTokenDispatcher", "routed_experts", recipe="mxfp8").build())
    assert torch.equal(layer(batch(0)[0]), want)
    with pytest.raises(fm.InputError, match="got 'mxfp9'"):
        layer_config("GroupedExperts", "LocalTokenDispatcher", "routed_experts", recipe="mxfp9").build()


def test_configurations():
    config = layer_config("GroupedExperts", "AllToAllTokenDispatcher").routed_experts
    override = importlib.import_module(OURS["routed_experts"].rpartition(".")[0]).routed_experts
    changed = override(config, max_tokens=7)
    assert (changed.max_tokens, changed.engine) == (7, "auto")
    assert changed.sharding_config is config.sharding_config
    assert changed.inner_experts.sharding_config is config.inner_experts.sharding_config
    assert override(changed) is changed
    with pytest.raises(fm.InputError, match=r"a configuration of RoutedExperts, got .*GroupedExperts\.Config"):
        override(config.inner_experts)
