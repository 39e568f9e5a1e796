"""Experts of Megatron-Core."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from kit import oracles
from kit.framework_oracle import loop
from kit.megatron_core import Group, megatron_core
from kit.oracles import exact_copies
from kit.rounding import relative_error
from torch import distributed as dist

import fusedmoe as fm
from fusedmoe.integrations.megatron import FusedGroupedMLP

HIDDEN, INTERMEDIATE = 32, 16
COUNTS = [5, 0, 9, 1]
ROWS = 18  # three belong to no expert
BF16 = torch.bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.01}


@pytest.fixture(scope="module")
def megatron():
    return megatron_core()


def make_config(megatron, activation="swiglu", **settings):
    clamped = {"activation_func_clamp_value": 0.5}
    chosen = {
        "swiglu": {"activation_func": F.silu},
        "clamped": {"activation_func": F.silu, **clamped},
        "gpt-oss": {"activation_func": megatron.quick_gelu, "glu_linear_offset": 1.0, **clamped},
        "geglu": {"activation_func": F.gelu},
        "reglu": {"activation_func": F.relu},
        "squared_relu": {"activation_func": megatron.squared_relu, "gated_linear_unit": False},
    }[activation]
    sizes = {
        "hidden_size": HIDDEN, "moe_ffn_hidden_size": INTERMEDIATE, "num_moe_experts": len(COUNTS),
        "moe_router_topk": 2, "add_bias_linear": False, "use_cpu_initialization": True, "params_dtype": torch.float32,
        "gated_linear_unit": True,
    }  # fmt: skip
    return megatron.transformer_config(**sizes | chosen | settings)


def make(megatron, activation="swiglu", recipe=None, experts=4, groups=None, **settings):
    config = make_config(megatron, activation, **settings)
    groups = groups or megatron.ProcessGroupCollection()
    module = FusedGroupedMLP(experts, config, pg_collection=groups, recipe=recipe)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def rows(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, ROWS, HIDDEN, generator=generator).to(dtype)
    probs = torch.rand(ROWS, generator=generator) + 0.1
    x[sum(COUNTS) :] = float("nan")  # never read
    return x.requires_grad_(), probs.requires_grad_(), dy


ACTIVATIONS = {
    "swiglu": lambda h: oracles.glu(h, "swiglu"),
    "clamped": lambda h: oracles.glu(h, "swiglu", 0.5),
    "gpt-oss": lambda h: oracles.glu(h, "swiglu", 0.5, 1.702, 1.0),
    "geglu": lambda h: oracles.glu(h, "geglu_erf"),
    "reglu": lambda h: oracles.glu(h, "reglu"),
    "squared_relu": oracles.squared_relu,
}


def expected(activation, module, x, probs, dy):
    """Exact output, and gradients of the rows, the probabilities and each parameter."""
    named = dict(module.named_parameters())
    leaves = dict(zip(named, exact_copies(*named.values()), strict=True))
    exact_x = x.detach().double()
    exact_x[sum(COUNTS) :] = 0
    exact_x.requires_grad_()
    (exact_probs,) = exact_copies(probs)
    both = torch.cat([exact_x, exact_probs[:, None]], dim=1)

    def product(layer, e, h):
        bias = leaves.get(f"linear_{layer}.bias")
        return h @ leaves[f"linear_{layer}.weight"][e].T, 0 if bias is None else bias[e]

    def expert(e, r):
        h, p = r[:, :-1], r[:, -1:]
        if module.config.moe_apply_probs_on_input:
            h, p = h * p, 1
        y, bias = product("fc1", e, h)
        y, last_bias = product("fc2", e, ACTIVATIONS[activation](y + bias) * p)
        return y + last_bias * p

    y = loop(both, COUNTS, expert)
    y.backward(dy.double())
    return y, {"x": exact_x.grad, "probs": exact_probs.grad} | {name: leaf.grad for name, leaf in leaves.items()}


def check(activation, module, dtype=torch.float32, counts=None):
    x, probs, dy = rows(dtype)
    y, bias = module(x, torch.tensor(COUNTS) if counts is None else counts, probs)
    assert bias is None
    y.backward(dy)
    want, gradients = expected(activation, module, x, probs, dy)
    assert relative_error(y, want) < TOLERANCE[dtype]
    for name, leaf in {"x": x, "probs": probs, **dict(module.named_parameters())}.items():
        assert leaf.grad.dtype is leaf.dtype
        assert relative_error(leaf.grad, gradients[name]) < 2 * TOLERANCE[dtype], name
        if name in ("x", "probs"):
            assert not leaf.grad[sum(COUNTS) :].any()
        else:
            assert not leaf.grad[1].any(), name  # the expert without rows
    assert not y[sum(COUNTS) :].any()


BIAS = {"add_bias_linear": True}
ON_INPUT = {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True}
# activation, settings of the configuration, and of the call
CASES = {
    **{activation: (activation, {}, {}) for activation in ("swiglu", "clamped", "gpt-oss", "geglu", "reglu")},
    "squared_relu": ("squared_relu", {}, {}),
    "swiglu, bias": ("swiglu", BIAS, {}),
    "gpt-oss, bias": ("gpt-oss", BIAS, {}),
    "bf16": ("swiglu", {"params_dtype": BF16, "bf16": True}, {"dtype": BF16}),
    "probabilities on the input": ("swiglu", ON_INPUT, {}),
    "probabilities on the input, bias": ("swiglu", ON_INPUT | BIAS, {}),
    "counts in a list": ("swiglu", {}, {"counts": COUNTS}),
    "latent size": ("swiglu", {"hidden_size": 64, "moe_latent_size": HIDDEN}, {}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_and_gradients(megatron, case):
    activation, settings, call = case
    check(activation, make(megatron, activation, **settings), **call)


def test_a_recipe(megatron):
    x, probs, _ = rows()
    plain, quantized = make(megatron), make(megatron, recipe="mxfp8")
    with fm.recipe("mxfp8"):
        want, _ = plain(x, COUNTS, probs)
    got, _ = quantized(x, COUNTS, probs)
    assert torch.equal(got, want)
    assert not torch.equal(plain(x, COUNTS, probs)[0], want)
    config = make_config(megatron)
    config.fp8 = "hybrid"  # Transformer Engine's
    module = FusedGroupedMLP(4, config, pg_collection=megatron.ProcessGroupCollection(), recipe="mxfp8")
    module.load_state_dict(plain.state_dict())
    assert torch.equal(module(x, COUNTS, probs)[0], want)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_megatron_sums_over_ranks(megatron, ranks):
    groups = megatron.ProcessGroupCollection(ep=Group(ranks, ranks - 1))
    module = make(megatron, groups=groups, expert_model_parallel_size=ranks, **BIAS)
    assert {p.allreduce for p in module.parameters()} == {ranks == 1}
    assert all(p.tensor_model_parallel for p in module.parameters())


# ---- parameters ---------------------------------------------------------------------------------------------------


def test_initialisation(megatron):
    def constant(value):
        def init(tensor):
            assert tensor.dim() == 2, "not one expert"
            torch.nn.init.constant_(tensor, value)

        return init

    settings = {"init_method": constant(0.25), "output_layer_init_method": constant(-0.5), **BIAS}
    config = make_config(megatron, **settings)
    module = FusedGroupedMLP(4, config, pg_collection=megatron.ProcessGroupCollection())
    found = {name: (tuple(p.shape), set(p.flatten().tolist())) for name, p in module.named_parameters()}
    assert found == {
        "linear_fc1.weight": ((4, 2 * INTERMEDIATE, HIDDEN), {0.25}),
        "linear_fc1.bias": ((4, 2 * INTERMEDIATE), {0.0}),
        "linear_fc2.weight": ((4, HIDDEN, INTERMEDIATE), {-0.5}),
        "linear_fc2.bias": ((4, HIDDEN), {0.0}),
    }


def test_a_hook_on_every_module_sees_the_parameters_and_splits_nothing(megatron):
    """Megatron waits for gathered parameters in a hook before each module's forward, for that module's own ones."""
    module = make(megatron)
    plan = str(module.explain(*_call()))
    seen = []
    for part in module.modules():
        part.register_forward_pre_hook(lambda m, _: seen.extend(m.parameters(recurse=False)))
    check("swiglu", module)
    assert {id(p) for p in seen} == {id(p) for p in module.parameters()}
    assert str(module.explain(*_call())) == plan


def _call():
    x, probs, _ = rows()
    return x, COUNTS, probs


def test_explain_of_a_model(megatron):
    """Evenly routed rows, in the dtype and on the device of the weights, without hooks that would gather parameters."""
    model = torch.nn.ModuleDict({"a": make(megatron, **BIAS), "b": make(megatron, **BIAS)})
    for part in model.modules():
        part.register_forward_pre_hook(lambda *_: pytest.fail("a hook has run"))
    (group,) = fm.explain(model, tokens=18).groups
    assert (group.kind, group.names, group.note) == ("FusedGroupedMLP", ("a", "b"), "")
    x, probs = torch.zeros(18, HIDDEN, requires_grad=True), torch.ones(18, requires_grad=True)
    own = make(megatron, **BIAS).explain(x, [5, 5, 4, 4], probs)
    assert str(group.explanation) == str(own)


# ---- checkpoints --------------------------------------------------------------------------------------------------


def test_state_dict_has_the_names_of_transformer_engine(megatron):
    module, other = make(megatron, add_bias_linear=True), make(megatron, add_bias_linear=True)
    parent = torch.nn.ModuleDict({"experts": module})
    state = parent.state_dict()
    names = {f"experts.linear_fc{i}.{name}{e}" for i in (1, 2) for name in ("weight", "bias") for e in range(4)}
    assert set(state) == names
    assert state["experts.linear_fc1.weight2"].shape == (2 * INTERMEDIATE, HIDDEN)
    assert torch.equal(state["experts.linear_fc2.weight3"], module.linear_fc2.weight[3])
    state["experts.linear_fc1._extra_state"] = None  # Transformer Engine's
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    torch.nn.ModuleDict({"experts": other}).load_state_dict(state)
    for got, want in zip(other.parameters(), module.parameters(), strict=True):
        assert torch.equal(got, want)


def tensors(part):
    return [part] if not isinstance(part, list) else [tensor for p in part for tensor in tensors(p)]


def put_together(factories, layer):
    """The global tensors of a distributed checkpoint, for one layer of a stack; each element is written once."""
    whole, written = {}, {}
    for factory in factories:
        for shard in tensors(factory.build()):
            if shard.key not in whole:
                whole[shard.key] = torch.zeros(shard.global_shape)
                written[shard.key] = torch.zeros(shard.global_shape, dtype=torch.int64)
            data = shard.data.reshape((1,) * (len(shard.global_shape) - shard.data.dim()) + tuple(shard.data.shape))
            at = tuple(slice(o, o + n) for o, n in zip(shard.global_offset, data.shape, strict=True))
            whole[shard.key][at] = data
            written[shard.key][at] += 1
    assert all((count[layer] == 1).all() for count in written.values())
    return {key: tensor[layer] for key, tensor in whole.items()}


@pytest.mark.parametrize(("activation", "bias"), [("swiglu", True), ("squared_relu", False)])
def test_distributed_checkpoints(megatron, activation, bias):
    """Two ranks of two experts each; the layer is the third of five in a stack whose keys have no layer number."""
    settings = {"expert_model_parallel_size": 2, "add_bias_linear": bias}
    factories, parameters = [], {}
    for rank in (0, 1):
        groups = megatron.ProcessGroupCollection(ep=Group(2, rank), expt_dp=Group(4, 3))
        module = make(megatron, activation, experts=2, groups=groups, **settings)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(rank)
        found = module.sharded_state_dict("mlp.experts.", ((0, 2, 5),))
        for name, parameter in module.named_parameters():
            factory = found[f"mlp.experts.{name}"]
            assert factory.data is parameter  # by which an optimizer's state is found
            assert factory.replica_id == (0, 0, 3)
            merged = factory.merge_fn(_data_of(factory.build()))
            assert torch.equal(merged, parameter)
            factories.append(factory)
            parameters.setdefault(name, []).append(parameter.detach())
    for name, parts in parameters.items():
        assert torch.equal(put_together(factories, layer=2)[f"mlp.experts.experts.{name}"], torch.cat(parts))


def _data_of(part):
    return [_data_of(p) for p in part] if isinstance(part, list) else part.data


def test_distributed_checkpoints_with_a_key_for_each_expert(megatron):
    groups = megatron.ProcessGroupCollection(ep=Group(2, 1))
    module = make(megatron, experts=2, groups=groups, expert_model_parallel_size=2)
    found = module.sharded_state_dict("experts.", metadata={"singleton_local_shards": True})
    factory = found["experts.linear_fc1.weight"]
    shards = {shard.key: shard.data for shard in tensors(factory.build())}
    names = {f"experts.experts.{e}.linear_fc1.weight_{half}" for e in (2, 3) for half in "wv"}
    assert set(shards) == names
    assert torch.equal(shards["experts.experts.3.linear_fc1.weight_v"], module.linear_fc1.weight[1, INTERMEDIATE:])
    shards = tensors(found["experts.linear_fc2.weight"].build())
    assert [shard.key for shard in shards] == [f"experts.experts.{e}.linear_fc2.weight" for e in (2, 3)]
    # an optimizer's state, under a key of its own
    state = factory.build_fn(f"optimizer.state.exp_avg.{factory.key}", torch.randn(factory.data.shape), (0, 0, 0), None)
    assert tensors(state)[0].key == "optimizer.state.exp_avg.experts.experts.2.linear_fc1.weight_w"


# ---- beside Megatron's own ------------------------------------------------------------------------------------------


@pytest.fixture
def sequential(megatron, monkeypatch):
    """Build Megatron's own experts, a loop over MLPs, and ours, in the process groups of one process."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules

    if not torch.cuda.is_available():  # which Megatron does not ask
        moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    groups = ProcessGroupCollection.use_mpu_process_groups()

    def build(activation, **settings):
        config = make_config(megatron, activation, **settings)
        layers = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        own = megatron.SequentialMLP(len(COUNTS), config, layers, pg_collection=groups)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in own.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        return own, FusedGroupedMLP(len(COUNTS), config, pg_collection=groups)

    try:
        yield build
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def save_and_load(directory, saved, loaded, **metadata):
    from megatron.core import dist_checkpointing

    directory.mkdir()
    dist_checkpointing.save(saved.sharded_state_dict("experts.", (), metadata), str(directory))
    state = dist_checkpointing.load(loaded.sharded_state_dict("experts.", (), metadata), str(directory))
    loaded.load_state_dict({name.removeprefix("experts."): value for name, value in state.items()})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("activation", "singleton_local_shards"), [("swiglu", True), ("squared_relu", False)])
def test_checkpoints_of_megatrons_own_experts(sequential, activation, singleton_local_shards, tmp_path):
    """Saved by the one and loaded by the other, both ways: the results are the same, the parameters bit for bit."""
    metadata = {"singleton_local_shards": singleton_local_shards}
    own, module = sequential(activation)
    save_and_load(tmp_path / "own", own, module, **metadata)
    x, probs = (t.detach()[: sum(COUNTS)] for t in rows()[:2])
    want, _ = own(x, torch.tensor(COUNTS), probs)
    assert relative_error(module(x, torch.tensor(COUNTS), probs)[0], want.double()) < 1e-5
    before = [p.detach().clone() for p in own.parameters()]
    for parameter in own.parameters():
        parameter.data.zero_()
    save_and_load(tmp_path / "ours", module, own, **metadata)
    assert all(torch.equal(p, want) for p, want in zip(own.parameters(), before, strict=True))


@pytest.mark.usefixtures("sequential")  # for the process groups
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("fused", "overlap"), [(False, True), (True, False)])
def test_in_the_data_parallel_wrapper(megatron, fused, overlap):
    """Two micro-batches: the gradients in Megatron's buffer, by its hooks or added here, are the sum of both."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    names = ("overlap_grad_reduce", "use_distributed_optimizer", "overlap_param_gather")
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **dict.fromkeys(names, overlap))
    module = make(megatron, gradient_accumulation_fusion=fused)
    wrapper = DistributedDataParallel(module.config, options, module)
    wrapper.zero_grad_buffer()
    x, probs, dy = rows()
    _, gradients = expected("swiglu", module, x, probs, dy)
    with wrapper.no_sync():
        wrapper(x, COUNTS, probs)[0].backward(dy)
    wrapper(x, COUNTS, probs)[0].backward(dy)
    wrapper.finish_grad_sync()
    assert module.backward_dw() is None
    for name, parameter in module.named_parameters():
        assert parameter.grad is None
        assert parameter.grad_added_to_main_grad == fused
        assert relative_error(parameter.main_grad, 2 * gradients[name]) < 1e-5


@pytest.mark.filterwarnings("ignore")
def test_a_layer_with_these_experts(sequential):
    """In an MoELayer, by the builder's interface, against the layer with Megatron's own experts."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    own, _ = sequential("swiglu")
    config = own.config
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    layers = [
        MoELayer(config, MoESubmodules(experts=experts))
        for experts in (
            ModuleSpec(module=SequentialMLP, submodules=mlp),
            FusedGroupedMLP,
            ModuleSpec(module=FusedGroupedMLP, params={"recipe": "mxfp8"}),
        )
    ]
    first, *fused = layers
    for layer in fused:
        layer.router.load_state_dict(first.router.state_dict())
        for name in ("linear_fc1", "linear_fc2"):
            weights = [getattr(mlp, name).weight.detach() for mlp in first.experts.local_experts]
            getattr(layer.experts, name).weight.data.copy_(torch.stack(weights))
    x = torch.randn(6, 2, HIDDEN, generator=torch.Generator().manual_seed(0))
    want, plain, quantized = (layer(x)[0] for layer in layers)
    assert relative_error(plain, want.double()) < 1e-5
    assert 1e-3 < relative_error(quantized, want.double()) < 0.1


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "message"), [
    ({"activation_func": torch.tanh}, "activation_func: expected F.silu, quick_gelu, F.gelu or F.relu .* got 'tanh'"),
    ({"activation_func_fp8_input_store": True}, "activation_func_fp8_input_store: expected none, got True"),
    ({"fp8": "hybrid"}, "fp8='hybrid' .* expected a recipe"),
    ({"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
     "recompute_modules: expected nothing within the experts, got moe_act"),
    ({"fine_grained_activation_offloading": True, "offload_modules": ["expert_fc1", "core_attn"]},
     "offload_modules: expected nothing within the experts, got expert_fc1"),
    ({"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input: expected with moe_router_topk=1, got 2"),
    ({}, "expected expert_tensor_parallel_size=1, got 2"),
])  # fmt: skip
def test_configurations_that_are_refused(megatron, settings, message):
    config = make_config(megatron)
    for name, value in settings.items():  # set afterwards: Megatron has checks of its own
        setattr(config, name, value)
    groups = megatron.ProcessGroupCollection(expt_tp=Group(1 if settings else 2))
    with pytest.raises(fm.InputError, match=message):
        FusedGroupedMLP(4, config, pg_collection=groups)
