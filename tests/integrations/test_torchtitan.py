"""Experts of torchtitan."""

import copy
import importlib
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from kit import torchtitan_models
from kit.framework_oracle import loop
from kit.oracles import exact_copies
from kit.rounding import relative_error
from kit.torchtitan_models import LIMIT, exact_expert, filled, imported
from kit.two_ranks import pool
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm

OURS = "fusedmoe.integrations.torchtitan"
DIM, HIDDEN_DIM = 32, 16
COUNTS = [5, 0, 9, 1]
SPLITS = torch.tensor(COUNTS)
ROWS = 18  # three belong to no expert
SIZES = {"dim": DIM, "hidden_dim": HIDDEN_DIM, "num_experts": len(COUNTS)}
KINDS = pytest.mark.parametrize("kind", torchtitan_models.KINDS)
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def titan():
    """torchtitan's class of experts, and this package's integration."""
    moe = imported("torchtitan.models.common.moe")
    return SimpleNamespace(GroupedExperts=moe.GroupedExperts, ours=importlib.import_module(OURS))


def stock_config(titan, kind):
    if kind == "GroupedExperts":
        return titan.GroupedExperts.Config(**SIZES)
    module = imported("torchtitan.models.gpt_oss.moe")
    return module.GptOssGroupedExperts.Config(**SIZES, swiglu_limit=LIMIT)


def make(titan, kind, dtype=FP32, **settings):
    return filled(titan.ours.experts(stock_config(titan, kind), **settings).build(), dtype)


def rows(dtype=BF16):
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, ROWS, DIM, generator=generator).bfloat16().to(dtype)
    x[sum(COUNTS) :] = float("nan")  # never read
    return x.requires_grad_(), dy


def expected(x, parameters, counts=COUNTS, dy=None):
    """Exact output, and gradients of the rows and of each parameter."""
    leaves = dict(zip(parameters, exact_copies(*parameters.values()), strict=True))
    x = x.detach().double()
    x[sum(counts) :] = 0
    x.requires_grad_()
    y = loop(x, counts, exact_expert(leaves))
    y.backward(torch.ones_like(y) if dy is None else dy.double())
    return y, x.grad, {name: leaf.grad for name, leaf in leaves.items()}


def both(got, want, x, dy):
    """Calls two modules, which have the same bits; with gradients."""
    y, expected = got(x, SPLITS), want(x, SPLITS)
    assert expected.any()
    assert torch.equal(y, expected)
    y.backward(dy)
    expected.backward(dy)
    return [(name, p, q) for (name, p), q in zip(got.named_parameters(), want.parameters(), strict=True)]


@KINDS
@pytest.mark.parametrize(("dtype", "of_rows"), [(FP32, FP32), (BF16, BF16), (FP32, BF16)])
def test_output_and_gradients(titan, kind, dtype, of_rows):
    module, (x, dy) = make(titan, kind, dtype), rows(of_rows)
    y = module(x, SPLITS)
    y.backward(dy)
    parameters = dict(module.named_parameters())
    want_y, want_dx, want = expected(x, parameters, dy=dy)
    assert y.dtype is x.dtype
    assert relative_error(y, want_y) < 0.01
    assert relative_error(x.grad, want_dx) < 0.01
    assert not y[sum(COUNTS) :].any()
    assert not x.grad[sum(COUNTS) :].any()
    for name, parameter in parameters.items():
        assert parameter.grad.dtype is parameter.dtype
        assert relative_error(parameter.grad, want[name]) < 0.01, name
        assert not parameter.grad[1].any(), name  # the expert without rows


@KINDS
def test_checkpoints_are_the_frameworks(titan, kind):
    stock, module = filled(stock_config(titan, kind).build()), titan.ours.experts(stock_config(titan, kind)).build()
    x, _ = rows()
    shapes = {name: (t.shape, t.dtype) for name, t in stock.state_dict().items()}
    assert {name: (t.shape, t.dtype) for name, t in module.state_dict().items()} == shapes
    module.load_state_dict(stock.state_dict())
    y = module(x, SPLITS)  # after a call too: what it keeps is in no checkpoint
    assert list(module.state_dict()) == list(shapes)
    assert relative_error(y, expected(x, stock.state_dict())[0]) < 0.01


def test_a_recipe_of_the_override(titan):
    x, _ = rows()
    plain, quantized = make(titan, "GroupedExperts"), make(titan, "GroupedExperts", recipe="mxfp8")
    with fm.recipe("mxfp8"):
        want = plain(x, SPLITS)
    assert torch.equal(quantized(x, SPLITS), want)
    assert not torch.equal(plain(x, SPLITS), want)
    with fm.recipe("fp8_block"):
        assert torch.equal(quantized(x, SPLITS), want)
    config = titan.ours.experts(stock_config(titan, "GroupedExperts"), recipe="mxfp8")
    assert titan.ours.experts(config) is config
    config = stock_config(titan, "GroupedExperts")
    config.param_init = {"w1_EFD": torch.nn.init.ones_}
    assert titan.ours.experts(config).param_init == config.param_init


@pytest.mark.parametrize(("kind", "dtype", "kept"), [
    ("GroupedExperts", FP32, []), ("GroupedExperts", BF16, ["w2_EDF"]), ("GptOssGroupedExperts", FP32, []),
    ("GptOssGroupedExperts", BF16, ["mlp1_weight_EGD", "mlp2_weight_EDF"]),
])  # fmt: skip
def test_weights_that_are_passed_on_as_they_are_stay_quantized(titan, kind, dtype, kept, count):
    """A cast weight, and the concatenation of gate and up, are new tensors in each call."""
    module = make(titan, kind, dtype, recipe="mxfp8")
    elements = sum(getattr(module, name).numel() for name in kept)
    for i in range(3):
        x, dy = rows()
        y = module(x, SPLITS)
        y.backward(dy)
        assert count() == 2 * (2 if i == 0 else 2 - len(kept))
        assert fm.weight_cache_bytes(module) >= 2 * elements * 33 // 32  # more if a scale's block is not full
        assert (fm.weight_cache_bytes(module) > 0) is bool(kept)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
        again = copy.deepcopy(module)(x, SPLITS)
        assert torch.equal(module(x, SPLITS), again)
        assert not torch.equal(again, y)


@pytest.mark.parametrize(("kind", "dtype"), [("GroupedExperts", FP32), ("GptOssGroupedExperts", BF16)])
def test_explain_of_a_model(titan, kind, dtype):
    model = torch.nn.ModuleList([make(titan, kind, dtype), make(titan, kind, dtype)])
    (group,) = fm.explain(model, tokens=18).groups
    assert (group.names, group.note) == (("0", "1"), "")
    assert group.kind == type(model[0]).__name__
    x = torch.zeros(18, DIM, dtype=dtype, requires_grad=True)
    assert str(group.explanation) == str(model[0].explain(x, torch.tensor([5, 5, 4, 4])))


def test_refusals(titan):
    class Float8GroupedExperts(titan.GroupedExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(titan.GroupedExperts.Config):
            pass

    with pytest.raises(fm.InputError, match=r"a configuration of GroupedExperts .* got .*Float8GroupedExperts\.Config"):
        titan.ours.experts(Float8GroupedExperts.Config(**SIZES))


@KINDS
def test_in_a_graph(titan, kind):
    x, dy = rows()
    compiled, eager = make(titan, kind), make(titan, kind)
    run = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    run.named_parameters = compiled.named_parameters
    for name, got, want in both(run, eager, x, dy):
        assert torch.equal(got.grad, want.grad), name


# ---- parameters that are DTensors ---------------------------------------------------------------------------------


@pytest.fixture
def of_two():
    """The first of two ranks: its part alone is looked at, and nothing is communicated."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


def distribute(module, axis, part=lambda t: t):
    """The module with parameters that have a part for each rank, of an axis that torchtitan shards them along."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(axis,))
    for name, parameter in list(module.named_parameters()):
        placement = {"w2_EDF": Shard(2), "mlp2_weight_EDF": Shard(2), "mlp2_bias_ED": Replicate()}.get(name, Shard(1))
        placement = Shard(0) if axis == "ep" else placement
        sharded = DTensor.from_local(part(parameter.detach()).clone(), mesh, [placement], run_check=False)
        module.register_parameter(name, torch.nn.Parameter(sharded))
    return module


@pytest.mark.parametrize(("kind", "axis"), [("GroupedExperts", "tp"), ("GptOssGroupedExperts", "ep")])
@pytest.mark.usefixtures("mesh")
def test_dtensors(titan, kind, axis):
    plain = make(titan, kind)
    for name, got, want in both(distribute(copy.deepcopy(plain), axis), plain, *rows()):
        assert got.grad.placements == got.placements, name
        assert torch.equal(got.grad.to_local(), want.grad), name


@pytest.mark.parametrize(("group", "names", "kind"), [
    ("mesh", None, "GptOssGroupedExperts"), ("of_two", None, "GroupedExperts"),
    ("of_two", ("fsdp",), "GptOssGroupedExperts"),
])  # fmt: skip
def test_explain_of_a_model_under_fsdp(titan, kind, names, group, request):
    """A part of the parameters is no part of the experts."""
    from torch.distributed.fsdp import fully_shard

    request.getfixturevalue(group)
    module = make(titan, kind)
    plain = str(fm.explain(module).groups[0].explanation)
    fully_shard(module, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=names))
    (found,) = fm.explain(module).groups
    if group == "mesh":
        assert str(found.explanation) == plain
    else:
        name = next(name for name, _ in module.named_parameters())
        assert found.explanation is None
        assert f"{name}: expected all of this rank's experts, got a shard over" in found.note


@pytest.mark.parametrize(("kind", "checkpointed"), [("GroupedExperts", True), ("GptOssGroupedExperts", False)])
def test_fsdp(titan, kind, checkpointed, mesh):
    """Parameters kept in fp32 and gathered in bf16, with activation checkpointing or without."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    x, dy = rows()
    plain = make(titan, kind)
    module = copy.deepcopy(plain)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    fully_shard(module, mesh=mesh, mp_policy=policy)

    def called(*args):
        return checkpoint(module, *args, use_reentrant=False) if checkpointed else module(*args)

    called.named_parameters = module.named_parameters
    both(called, plain, x, dy)
    state = get_model_state_dict(module)
    for name, got, want in both(called, plain, x, dy):
        assert relative_error(got.grad.to_local(), want.grad.double()) < 1e-6, name
        assert torch.equal(state[name].to_local(), want)


@pytest.mark.usefixtures("of_two")
def test_experts_of_this_rank(titan):
    """Under expert parallelism a rank has fewer experts than the configuration says."""
    x, _ = rows()
    module = make(titan, "GroupedExperts")
    local = {name: p.detach()[:2].clone() for name, p in module.named_parameters()}
    distribute(module, "ep", lambda t: t[:2])
    assert module.w2_EDF.shape[0] == len(COUNTS)
    y = module(x, torch.tensor([4, 11]))
    assert relative_error(y, expected(x, local, [4, 11])[0]) < 0.01


@pytest.mark.usefixtures("of_two")
def test_the_last_bias_is_added_once_among_the_ranks_of_tensor_parallelism(titan):
    """Each of the two ranks adds half, and gets the whole gradient."""
    plain = make(titan, "GptOssGroupedExperts")
    halved = copy.deepcopy(plain)
    with torch.no_grad():
        halved.mlp2_bias_ED.div_(2)
    for name, got, want in both(distribute(plain, "tp"), halved, *rows()):
        assert torch.equal(got.grad.to_local(), want.grad), name


# ---- beside torchtitan's own ---------------------------------------------------------------------------------------


@KINDS
def test_against_torchtitans_own(titan, kind):
    x, _ = rows()
    used = slice(0, sum(COUNTS))
    own, module = filled(stock_config(titan, kind).build()), make(titan, kind)
    want = own(x.detach().nan_to_num(), SPLITS)
    assert relative_error(module(x, SPLITS)[used], want[used].detach().double()) < 0.01


OVERRIDES = {"experts": f"{OURS}.experts", "routed_experts": f"{OURS}_routed.routed_experts"}
CLOSE = 0.02  # in bf16: GPT-OSS's limit makes it more than 0.01
ROUTING = {"num_experts": len(COUNTS), "top_k": 2}
PARAMETERS = {
    "GroupedExperts": ("w1_EFD", "w2_EDF", "w3_EFD"),
    "GptOssGroupedExperts": ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED"),
}
ROUTER = pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")  # torchtitan's router asks for fp32


def layer_config(kind, dispatcher, override=None, balanced=False, init=None, **settings):
    """A layer of torchtitan, with experts that are sharded if there is a mesh axis "ep"."""
    moe, dispatchers = (imported(f"torchtitan.models.common.{name}") for name in ("moe", "token_dispatcher"))
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config

    experts = stock_config(SimpleNamespace(GroupedExperts=moe.GroupedExperts), kind)
    gate = moe.Linear.Config(in_features=DIM, out_features=len(COUNTS))
    if init is not None:
        experts.param_init, gate.param_init = dict.fromkeys(PARAMETERS[kind], init), {"weight": init}
    config = moe.MoE.Config(
        num_experts=len(COUNTS),
        load_balance_coeff=None,
        router=moe.TokenChoiceTopKRouter.Config(**ROUTING, gate=gate, _debug_force_load_balance=balanced),
        routed_experts=moe.RoutedExperts.Config(
            inner_experts=experts, token_dispatcher=getattr(dispatchers, dispatcher).Config(**ROUTING)
        ),
    )
    set_moe_sharding_config(
        config, enable_ep=True, enable_sp=False, expert_param_layout=dict.fromkeys(PARAMETERS[kind])
    )
    if override is not None:
        assert len(apply_overrides(OverrideConfig(imports=[(OVERRIDES[override], settings)]), config)) == 1
    return config


def batch(rank):
    generator = torch.Generator().manual_seed(rank)
    x, dy = torch.randn(2, 2, 9, DIM, generator=generator).bfloat16().float()
    return x, dy


def with_exact_experts(kind, balanced=False):
    """torchtitan's layer on one rank, whose experts are a loop in fp64."""
    layer = filled(layer_config(kind, "LocalTokenDispatcher", balanced=balanced).build())
    experts = layer.routed_experts.inner_experts
    expert = exact_expert({name: parameter.double() for name, parameter in experts.named_parameters()})
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


@ROUTER
def test_initial_values_by_the_override():
    def init(parameter):
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(parameter.shape[1]))

    configs = [layer_config("GroupedExperts", "LocalTokenDispatcher", o, init=init) for o in (None, "experts")]
    own, layer = (config.build() for config in configs)
    for module in (own, layer):
        module.init_states()
    assert type(layer.routed_experts.inner_experts).__name__ == "FusedGroupedExperts"
    assert all(torch.equal(own.state_dict()[name], t) for name, t in layer.state_dict().items())
    assert layer.routed_experts.inner_experts.w1_EFD.any()


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


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Processes of their own: torchtitan keeps sharded modules, beside which no weight is kept quantized."""
    yield from pool(tmp_path_factory)


@ROUTER
@pytest.mark.distributed
@pytest.mark.parametrize(("override", "backend", "settings", "kind"), [
    ("experts", "partial_dtensor", {}, "GroupedExperts"), ("experts", "spmd_types", {}, "GptOssGroupedExperts"),
    ("routed_experts", "partial_dtensor", {"max_tokens": 20}, "GptOssGroupedExperts"),
    ("routed_experts", "spmd_types", {}, "GroupedExperts"),
])  # fmt: skip
def test_two_ranks_share_the_experts(ranks, kind, override, backend, settings):
    """They are one rank with all tokens and exact experts: with torchtitan's dispatcher, and with our exchange."""
    # gloo has no uneven exchange for torchtitan's dispatcher with this backend
    balanced = (override, backend) == ("experts", "spmd_types")
    x, dy = (torch.cat(parts) for parts in zip(batch(0), batch(1), strict=True))
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


@ROUTER
@KINDS
def test_one_rank(kind):
    """Without a mesh, and so without an exchange."""
    own = filled(layer_config(kind, "AllToAllTokenDispatcher").build())
    layer = layer_config(kind, "AllToAllTokenDispatcher", "routed_experts").build()
    layer.load_state_dict(own.state_dict())
    (y, dx, want), (got_y, got_dx, got) = (outcome(one, *batch(0)) for one in (with_exact_experts(kind), layer))
    assert got.keys() == want.keys()
    for name, gradient in (want | {"y": y, "x": dx}).items():
        assert relative_error((got | {"y": got_y, "x": got_dx})[name], gradient.double()) < CLOSE, name
    module, ops = steps_of(layer)
    assert module == "FusedRoutedExperts"
    assert not {"GatherTokens", "ReturnTokens"} & ops


@ROUTER
def test_settings_of_the_override_of_routed_experts():
    def make(**settings):
        return layer_config("GroupedExperts", "LocalTokenDispatcher", "routed_experts", **settings)

    with fm.recipe("mxfp8"):
        want = filled(make().build())(batch(0)[0])
    assert torch.equal(filled(make(recipe="mxfp8").build())(batch(0)[0]), want)
    config = layer_config("GroupedExperts", "AllToAllTokenDispatcher").routed_experts
    override = importlib.import_module(f"{OURS}_routed").routed_experts
    changed = override(config, max_tokens=7)
    assert (changed.max_tokens, changed.engine) == (7, "auto")
    assert changed.sharding_config is config.sharding_config
    assert override(changed) is changed
    with pytest.raises(fm.InputError, match=r"a configuration of RoutedExperts, got .*GroupedExperts\.Config"):
        override(config.inner_experts)
