"""Experts of torchtitan: in torchtitan itself where it can be imported, else in a stand-in of its interface."""

import copy
import importlib.util
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from kit import torchtitan_stand_in as stand_in
from kit.framework_oracle import exact, import_anew, install, loop, swiglu
from kit.rounding import relative_error
from torch import distributed as dist

import fusedmoe as fm

OURS = "fusedmoe.integrations.torchtitan"
DIM, HIDDEN_DIM = 32, 16
COUNTS = [5, 0, 9, 1]
ROWS = 18  # three belong to no expert
LIMIT = 0.5  # of GPT-OSS's activation: low enough that many values are beyond it


@pytest.fixture(params=["stand-in", "torchtitan"])
def titan(request, monkeypatch):
    """torchtitan's classes, and this package's integration of them."""
    if request.param == "torchtitan":
        moe = imported("torchtitan.models.common.moe")
        return SimpleNamespace(GroupedExperts=moe.GroupedExperts, ours=importlib.import_module(OURS))
    install(monkeypatch, stand_in.MODULES)
    return SimpleNamespace(GroupedExperts=stand_in.GroupedExperts, ours=import_anew(monkeypatch, OURS))


def imported(module):
    """A module of torchtitan's; without its kernels in Triton, which no test here runs, where there is no Triton."""
    pytest.importorskip("torchtitan")
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("triton") is None:
            patch.setitem(sys.modules, "torchtitan.distributed.minimal_async_ep.kernels", MagicMock())
        return pytest.importorskip(module, exc_type=ImportError)  # parts of it want a newer torch than 2.11


def stock_config(titan, kind):
    sizes = {"dim": DIM, "hidden_dim": HIDDEN_DIM, "num_experts": len(COUNTS)}
    if kind == "GroupedExperts":
        return titan.GroupedExperts.Config(**sizes)
    if titan.GroupedExperts is stand_in.GroupedExperts:
        return stand_in.GptOssGroupedExperts.Config(**sizes, swiglu_limit=LIMIT)
    moe = imported("torchtitan.models.gpt_oss.moe")
    return moe.GptOssGroupedExperts.Config(**sizes, swiglu_limit=LIMIT)


def fill(module, dtype=torch.float32):
    """Draw parameters that bf16 holds exactly, so that the exact result is of the very same numbers."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_((0.3 * torch.randn(parameter.shape, generator=generator)).bfloat16())
    return module.to(dtype)


def make(titan, kind, dtype=torch.float32, **settings):
    return fill(titan.ours.experts(stock_config(titan, kind), **settings).build(), dtype)


def rows(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, ROWS, DIM, generator=generator).bfloat16().to(dtype)
    x[sum(COUNTS) :] = float("nan")  # never read
    return x.requires_grad_(), dy


def expected(kind, x, dy, parameters, counts=COUNTS):
    """Exact output, and gradients of the rows and of each parameter."""
    leaves = dict(zip(parameters, exact(*parameters.values()), strict=True))
    x = x.detach().double()
    x[sum(counts) :] = 0
    x.requires_grad_()

    def plain(e, r):
        hidden = swiglu(r @ leaves["w1_EFD"][e].T, r @ leaves["w3_EFD"][e].T)
        return hidden @ leaves["w2_EDF"][e].T

    def gpt_oss(e, r):
        both = r @ leaves["mlp1_weight_EGD"][e].T + leaves["mlp1_bias_EG"][e]
        hidden = swiglu(both[:, ::2], both[:, 1::2], LIMIT, 1.702, 1.0)
        return hidden @ leaves["mlp2_weight_EDF"][e].T + leaves["mlp2_bias_ED"][e]

    y = loop(x, counts, plain if kind == "GroupedExperts" else gpt_oss)
    y.backward(dy.double())
    return y, x.grad, {name: leaf.grad for name, leaf in leaves.items()}


def check(kind, module, x, dy):
    y = module(x, torch.tensor(COUNTS))
    y.backward(dy)
    parameters = dict(module.named_parameters())
    want_y, want_dx, want = expected(kind, x, dy, parameters)
    assert y.dtype is x.dtype
    assert relative_error(y, want_y) < 0.01
    assert relative_error(x.grad, want_dx) < 0.01
    assert not y[sum(COUNTS) :].any()
    assert not x.grad[sum(COUNTS) :].any()
    for name, parameter in parameters.items():
        assert parameter.grad.dtype is parameter.dtype
        assert relative_error(parameter.grad, want[name]) < 0.01, name
        assert not parameter.grad[1].any(), name  # the expert without rows


KINDS = pytest.mark.parametrize("kind", ["GroupedExperts", "GptOssGroupedExperts"])


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradients(titan, kind, dtype):
    check(kind, make(titan, kind, dtype), *rows(dtype))


@KINDS
def test_parameters_in_fp32_and_rows_in_bf16(titan, kind):
    check(kind, make(titan, kind), *rows())


@KINDS
def test_checkpoints_are_the_frameworks(titan, kind):
    stock, module = fill(stock_config(titan, kind).build()), titan.ours.experts(stock_config(titan, kind)).build()
    x, _ = rows()
    shapes = {name: (t.shape, t.dtype) for name, t in stock.state_dict().items()}
    assert {name: (t.shape, t.dtype) for name, t in module.state_dict().items()} == shapes
    module.load_state_dict(stock.state_dict())
    y = module(x, torch.tensor(COUNTS))  # after a call too: what it keeps is in no checkpoint
    assert list(module.state_dict()) == list(shapes)
    assert relative_error(y, expected(kind, x, torch.zeros(ROWS, DIM), stock.state_dict())[0]) < 0.01
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.zero_()
    stock.load_state_dict(module.state_dict())
    assert all(torch.equal(stock.state_dict()[name], t) for name, t in module.state_dict().items())


@KINDS
def test_other_parameters_and_numbers_of_rows(titan, kind):
    """Nothing of the parameters is kept from call to call."""
    module = make(titan, kind)
    x, dy = rows()
    module(x, torch.tensor(COUNTS))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(-0.5)
    y = module(x[:7], torch.tensor([0, 7, 0, 0]))
    assert relative_error(y, expected(kind, x[:7], dy[:7], module.state_dict(), [0, 7, 0, 0])[0]) < 0.01
    empty = module(x[:0], torch.zeros(len(COUNTS), dtype=torch.int64))
    assert empty.shape == (0, DIM)


@KINDS
def test_a_copy_computes_on_its_own(titan, kind):
    module = make(titan, kind)
    x, _ = rows()
    y = module(x, torch.tensor(COUNTS))
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert torch.equal(copied(x, torch.tensor(COUNTS)), y)
    assert not module(x, torch.tensor(COUNTS)).any()


@KINDS
def test_a_recipe_of_the_override(titan, kind):
    x, _ = rows()
    counts = torch.tensor(COUNTS)
    plain, quantized = make(titan, kind), make(titan, kind, recipe="mxfp8")
    with fm.recipe("mxfp8"):
        want = plain(x, counts)
    assert torch.equal(quantized(x, counts), want)
    assert not torch.equal(plain(x, counts), want)
    with fm.recipe("fp8_block"):
        assert torch.equal(quantized(x, counts), want)
    with pytest.raises(fm.InputError, match="got 'mxfp9'"):
        titan.ours.experts(stock_config(titan, kind), recipe="mxfp9").build()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@KINDS
def test_weights_that_are_passed_on_as_they_are_stay_quantized(titan, kind, dtype, count):
    """A cast weight, and the concatenation of gate and up, are new tensors in each call."""
    module = make(titan, kind, dtype, recipe="mxfp8")
    kept = {"GroupedExperts": ["w2_EDF"], "GptOssGroupedExperts": ["mlp1_weight_EGD", "mlp2_weight_EDF"]}[kind]
    kept = kept if dtype is torch.bfloat16 else []
    for i in range(3):
        x, dy = rows()
        y = module(x, torch.tensor(COUNTS))
        y.backward(dy)
        assert count() == 2 * (2 if i == 0 else 2 - len(kept))
        elements = sum(getattr(module, name).numel() for name in kept)
        assert fm.weight_cache_bytes(module) >= 2 * elements * 33 // 32  # more if a scale's block is not full
        assert (fm.weight_cache_bytes(module) > 0) is bool(kept)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
        again = copy.deepcopy(module)(x, torch.tensor(COUNTS))
        assert torch.equal(module(x, torch.tensor(COUNTS)), again)
        assert not torch.equal(again, y)


@KINDS
def test_explain(titan, kind):
    x, _ = rows()
    text = str(make(titan, kind).explain(x, torch.tensor(COUNTS)))
    assert "gate_up" in text
    assert "down" in text


def test_explain_says_why_torchtitans_router_stays(titan):
    layer = torch.nn.Module()
    layer.router = type("Router", (torch.nn.Module,), {"__module__": "torchtitan.models.common.moe"})()
    layer.experts = make(titan, "GroupedExperts")
    line = "experts: the model's own router, Router, chooses the experts and runs unchanged: torchtitan's dispatcher"
    assert line in str(fm.explain(layer))


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_explain_of_a_model(titan, kind, dtype):
    model = torch.nn.ModuleList([make(titan, kind, dtype), make(titan, kind, dtype)])
    (group,) = fm.explain(model, tokens=18).groups
    assert (group.names, group.note) == (("0", "1"), "")
    assert group.kind == type(model[0]).__name__
    x = torch.zeros(18, DIM, dtype=dtype, requires_grad=True)
    assert str(group.explanation) == str(model[0].explain(x, torch.tensor([5, 5, 4, 4])))
    assert {s.direction for s in group.explanation.steps} == {"forward", "backward"}
    with torch.no_grad():
        (plan,) = fm.explain(model).plans
    assert {s.direction for s in plan.steps} == {"forward"}
    assert plan.dtype == "bfloat16"
    (group,) = fm.explain(model.to("meta")).groups
    assert group.explanation.plans[0].device == "meta"


def test_configurations(titan):
    config = titan.ours.experts(stock_config(titan, "GroupedExperts"), recipe="mxfp8")
    assert type(config) is titan.ours.FusedGroupedExperts.Config
    assert (config.dim, config.hidden_dim, config.num_experts) == (DIM, HIDDEN_DIM, len(COUNTS))
    assert titan.ours.experts(config) is config
    config = stock_config(titan, "GroupedExperts")
    config.param_init = {"w1_EFD": torch.nn.init.ones_}
    assert titan.ours.experts(config).param_init == config.param_init

    class Float8GroupedExperts(titan.GroupedExperts):
        @stand_in.dataclass(kw_only=True, slots=True)
        class Config(titan.GroupedExperts.Config):
            pass

    with pytest.raises(fm.InputError, match=r"a configuration of GroupedExperts .* got .*Float8GroupedExperts\.Config"):
        titan.ours.experts(Float8GroupedExperts.Config(dim=DIM, hidden_dim=HIDDEN_DIM, num_experts=4))


def test_what_does_not_fit_is_refused(titan):
    module = make(titan, "GroupedExperts")
    x, _ = rows()
    with pytest.raises(fm.InputError, match=r"splits: expected shape \(4,\)"):
        module(x, torch.tensor(COUNTS[:3]))
    with pytest.raises(fm.InputError, match=r"x: expected shape \(rows, 32\)"):
        module(x[:, :-1], torch.tensor(COUNTS))


@KINDS
def test_in_a_graph(titan, kind):
    x, dy = rows()
    compiled, eager = make(titan, kind), make(titan, kind)
    run = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for counts in ([5, 0, 9, 1], [2, 2, 2, 9]):
        y, want = run(x, torch.tensor(counts)), eager(x, torch.tensor(counts))
        assert want.any()
        assert torch.equal(y, want)
        y.backward(dy)
        want.backward(dy)
        for got, parameter in zip(compiled.parameters(), eager.parameters(), strict=True):
            assert torch.equal(got.grad, parameter.grad)


# ---- parameters that are DTensors ---------------------------------------------------------------------------------


@pytest.fixture
def process_group(request):
    if not dist.is_available():
        pytest.skip("torch is built without distributed")
    ranks = getattr(request, "param", 1)
    if ranks == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:  # this rank's part alone is looked at, and nothing is communicated
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def distribute(module, mesh, placement):
    from torch.distributed.tensor import DTensor

    for name, parameter in list(module.named_parameters()):
        sharded = DTensor.from_local(parameter.detach(), mesh, [placement(name)], run_check=False)
        module.register_parameter(name, torch.nn.Parameter(sharded))
    return module


@KINDS
@pytest.mark.parametrize("axis", ["ep", "tp"])
@pytest.mark.usefixtures("process_group")
def test_dtensors(titan, kind, axis):
    from torch.distributed.tensor import Shard

    x, dy = rows()
    plain = make(titan, kind)
    mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=(axis,))
    module = distribute(copy.deepcopy(plain), mesh, lambda _: Shard(0))
    y, want = module(x, torch.tensor(COUNTS)), plain(x, torch.tensor(COUNTS))
    assert want.any()
    assert torch.equal(y, want)
    y.backward(dy)
    want.backward(dy)
    for (name, got), parameter in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert got.grad.placements == got.placements, name
        assert torch.equal(got.grad.to_local(), parameter.grad), name


@KINDS
@pytest.mark.parametrize("axis", ["ep", "tp"])
@pytest.mark.parametrize("process_group", [2], indirect=True)
def test_explain_of_a_model_of_dtensors(titan, kind, axis, process_group):
    """Of what a rank has, as a call."""
    from torch.distributed.tensor import Replicate, Shard

    def placement(name):
        if axis == "ep":
            return Shard(0)
        return {"w2_EDF": Shard(2), "mlp2_weight_EDF": Shard(2), "mlp2_bias_ED": Replicate()}.get(name, Shard(1))

    plain = make(titan, kind)
    mesh = dist.init_device_mesh("cpu", (process_group,), mesh_dim_names=(axis,))
    module = distribute(copy.deepcopy(plain), mesh, placement)
    assert str(fm.explain(module).groups[0].explanation) == str(fm.explain(plain).groups[0].explanation)


@KINDS
@pytest.mark.parametrize("names", [("fsdp",), None], ids=["fsdp", "no name"])
@pytest.mark.parametrize("process_group", [1, 2], indirect=True)
def test_explain_of_a_model_under_fsdp(titan, kind, names, process_group):
    """A part of the parameters is no part of the experts."""
    from torch.distributed.fsdp import fully_shard

    module = make(titan, kind)
    plain = str(fm.explain(module).groups[0].explanation)
    fully_shard(module, mesh=dist.init_device_mesh("cpu", (process_group,), mesh_dim_names=names))
    (group,) = fm.explain(module).groups
    if process_group == 1:
        assert str(group.explanation) == plain
    else:
        name = next(name for name, _ in module.named_parameters())
        assert group.explanation is None
        assert f"{name}: expected all of this rank's experts, got a shard over" in group.note
        assert group.note in str(fm.explain(module))


@KINDS
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.usefixtures("process_group")
def test_fsdp(titan, kind, checkpointed):
    """Parameters kept in fp32 and gathered in bf16, with activation checkpointing or without."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.utils.checkpoint import checkpoint

    x, dy = rows()
    plain = make(titan, kind)
    module = copy.deepcopy(plain)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)), mp_policy=policy)
    for _ in range(2):
        counts = torch.tensor(COUNTS)
        y = checkpoint(module, x, counts, use_reentrant=False) if checkpointed else module(x, counts)
        want = plain(x, counts)
        assert want.any()
        assert torch.equal(y, want)
        y.backward(dy)
        want.backward(dy)
    state = get_model_state_dict(module)
    for (name, got), parameter in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert relative_error(got.grad.to_local(), parameter.grad.double()) < 1e-6, name
        assert torch.equal(state[name].to_local(), parameter)


@pytest.mark.parametrize("process_group", [2], indirect=True)
def test_experts_of_this_rank(titan, process_group):
    """Under expert parallelism a rank has fewer experts than the configuration says."""
    from torch.distributed.tensor import DTensor, Shard

    x, dy = rows()
    module = make(titan, "GroupedExperts")
    local = {name: p.detach()[:2].clone() for name, p in module.named_parameters()}
    mesh = dist.init_device_mesh("cpu", (process_group,), mesh_dim_names=("ep",))
    for name, part in local.items():
        sharded = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        assert sharded.shape[0] == len(COUNTS)
        module.register_parameter(name, torch.nn.Parameter(sharded))
    y = module(x, torch.tensor([4, 11]))
    assert relative_error(y, expected("GroupedExperts", x, dy, local, [4, 11])[0]) < 0.01


@pytest.mark.parametrize("process_group", [2], indirect=True)
def test_the_last_bias_is_added_once_among_the_ranks_of_tensor_parallelism(titan, process_group):
    """Each of the two ranks adds half, and gets the whole gradient."""
    from torch.distributed.tensor import Replicate, Shard

    def placement(name):
        return {"mlp2_weight_EDF": Shard(2), "mlp2_bias_ED": Replicate()}.get(name, Shard(1))

    kind = "GptOssGroupedExperts"
    x, dy = rows()
    plain = make(titan, kind)
    halved = copy.deepcopy(plain)
    with torch.no_grad():
        halved.mlp2_bias_ED.div_(2)
    mesh = dist.init_device_mesh("cpu", (process_group,), mesh_dim_names=("tp",))
    module = distribute(plain, mesh, placement)
    y, want = module(x, torch.tensor(COUNTS)), halved(x, torch.tensor(COUNTS))
    assert want.any()
    assert torch.equal(y, want)
    y.backward(dy)
    want.backward(dy)
    for (name, got), parameter in zip(module.named_parameters(), halved.parameters(), strict=True):
        assert torch.equal(got.grad.to_local(), parameter.grad), name


# ---- torchtitan itself --------------------------------------------------------------------------------------------


@KINDS
def test_against_torchtitans_own(titan, kind):
    if titan.GroupedExperts is stand_in.GroupedExperts:
        pytest.skip("the stand-in computes nothing")
    x, dy = rows()
    used = sum(COUNTS)
    x = x.detach().nan_to_num().requires_grad_()
    own, module = fill(stock_config(titan, kind).build()), make(titan, kind)
    y, want = module(x, torch.tensor(COUNTS)), own(x, torch.tensor(COUNTS))
    assert relative_error(y[:used], want[:used].double()) < 0.01
    (y[:used] * dy[:used]).sum().backward()
    (want[:used] * dy[:used]).sum().backward()
    for (name, got), parameter in zip(module.named_parameters(), own.named_parameters(), strict=True):
        assert name == parameter[0]
        assert relative_error(got.grad, parameter[1].grad.double()) < 0.01, name


@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")  # torchtitan's router asks for fp32
def test_a_layer_by_the_override(titan):
    """The override is found by its name, builds, is initialised as torchtitan says, and computes what its layer did."""
    if titan.GroupedExperts is stand_in.GroupedExperts:
        target, factory = stand_in.OVERRIDES[f"{OURS}.experts"]
        assert (target, factory) == (stand_in.GroupedExperts.Config, titan.ours.experts)
        return
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common import moe, token_dispatcher

    def config():
        def init(parameter):
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(parameter.shape[1]))

        names = ("w1_EFD", "w2_EDF", "w3_EFD")
        sizes = {"dim": DIM, "hidden_dim": HIDDEN_DIM, "num_experts": 4}
        gate = moe.Linear.Config(in_features=DIM, out_features=4, param_init={"weight": init})
        return moe.MoE.Config(
            num_experts=4,
            router=moe.TokenChoiceTopKRouter.Config(num_experts=4, top_k=2, gate=gate),
            routed_experts=moe.RoutedExperts.Config(
                inner_experts=moe.GroupedExperts.Config(**sizes, param_init=dict.fromkeys(names, init)),
                token_dispatcher=token_dispatcher.LocalTokenDispatcher.Config(num_experts=4, top_k=2),
            ),
        )

    changed = config()
    assert len(apply_overrides(OverrideConfig(imports=[f"{OURS}.experts"]), changed)) == 1
    own, layer = config().build(), changed.build()
    for module in (own, layer):
        module.init_states()
        module.bfloat16()
    assert isinstance(layer.routed_experts.inner_experts, titan.ours.FusedGroupedExperts)
    assert all(torch.equal(own.state_dict()[name], t) for name, t in layer.state_dict().items())
    x = torch.randn(2, 9, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert relative_error(layer(x), own(x).detach().double()) < 0.01
