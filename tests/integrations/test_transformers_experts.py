"""The experts of transformers: around a call, and around a model."""

import copy
import pickle
import sys
import types

import pytest
import torch
import transformers
from kit import families_page, moe_families
from kit.compare import assert_close
from kit.moe_families import step
from kit.stand_in_experts import E, H, I, Plain, arguments, by_tokens, config, outcome
from torch import nn

import fusedmoe as fm
import fusedmoe.integrations.transformers as fusedmoe_transformers
from fusedmoe.integrations.transformers import expert_modules, experts_forward

pytestmark = pytest.mark.usefixtures("registered")
EXACT = {"rtol": 1e-9, "atol": 1e-12}


# ---- around a call ------------------------------------------------------------------------------------------------


def sharded(module):
    module.gate_up_proj, module.down_proj = (
        nn.Parameter(w.detach()[: E // 2].clone()) for w in (module.gate_up_proj, module.down_proj)
    )
    module.num_experts = E // 2


def pruned(module):
    gate, up = module.gate_up_proj.detach().chunk(2, dim=1)
    narrow = I // 2
    module.gate_up_proj = nn.Parameter(torch.cat([gate[:, :narrow], up[:, :narrow]], dim=1))
    module.down_proj = nn.Parameter(module.down_proj.detach()[..., :narrow].clone())


@pytest.mark.parametrize("change", [sharded, pruned])
def test_experts_that_change_after_a_call(change):
    module, (x, index, weights) = Plain(config()), arguments()
    experts_forward(module, x, index, weights)
    change(module)
    given = x, index.clamp(max=module.num_experts), weights
    assert_close(outcome(experts_forward, module, *given), outcome(by_tokens, module, *given))


def test_expert_parallelism_skips_what_is_elsewhere():
    """As transformers' expert_parallel does it: fewer experts, and their number as the index of all others."""
    module = Plain(config("grouped_mm")).float()
    x, index, weights = arguments(torch.float32)
    sharded(module)
    here = module.num_experts
    index = torch.where(index < here, index, here)
    with torch.no_grad():
        weights.masked_fill_(index == here, 0.0)
    module._is_expert_parallel = True
    assert (index == here).all(-1).any(), "tokens all of whose experts are elsewhere"
    want = outcome(lambda m, *given: m(*given), module, x, index, weights)
    got = outcome(experts_forward, module, x, index, weights)
    assert_close(got, want, rtol=1e-4, atol=1e-4)

    elsewhere = index == here
    with torch.no_grad():
        x[elsewhere.all(-1)] = torch.nan
        weights[elsewhere] = torch.nan
    poisoned = outcome(experts_forward, module, x, index, weights)
    assert_close(poisoned, got)
    assert not poisoned["y"][elsewhere.all(-1)].any()
    assert not poisoned["weights"][elsewhere].any()


def test_parameters_that_are_dtensors(mesh):
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    module, given = Plain(config()), arguments()
    want = outcome(experts_forward, module, *given)
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(module, name).detach()
        setattr(module, name, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))
    got = outcome(experts_forward, module, *given)
    for name in ("gate_up_proj", "down_proj"):
        assert isinstance(got[name], DTensor)
        got[name] = got[name].to_local()
    assert_close(got, want)


@pytest.mark.parametrize(("rows", "factor", "autocast"), [
    (torch.float32, torch.float32, True), (torch.bfloat16, torch.float32, False),
    (torch.bfloat16, torch.bfloat16, True), (torch.float32, torch.bfloat16, False),
])  # fmt: skip
def test_dtypes(rows, factor, autocast):
    module, (x, index, weights) = Plain(config()), arguments()
    exact = outcome(experts_forward, module, x, index, weights)
    module = module.to(torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = outcome(experts_forward, module, x.to(rows), index, weights.to(factor))
    assert (got["y"].dtype, got["x"].dtype, got["weights"].dtype) == (rows, rows, factor)
    for name, want in exact.items():
        error = (got[name].double() - want).norm() / want.norm()
        assert error < 0.03, f"{name}: {error}"


def test_wrong_shapes_say_so():
    module, (x, index, weights) = Plain(config()), arguments()
    with pytest.raises(fm.InputError, match=rf"expert_weight: expected shape \({len(x)}, 2\)"):
        experts_forward(module, x, index, weights[:, :-1])
    with pytest.raises(fm.InputError, match="expert_index: expected integers"):
        experts_forward(module, x, weights, weights)
    with pytest.raises(fm.InputError, match="got 0 more and num_tokens"):
        experts_forward(module, x, index, weights, num_tokens=3)
    module.down_proj = nn.Parameter(module.down_proj.detach().mT)
    with pytest.raises(fm.InputError, match=rf"Plain: expected weights .* got \({E}, {2 * I}, {H}\) and"):
        experts_forward(module, x, index, weights)


# ---- explain ------------------------------------------------------------------------------------------------------


def test_explain():
    tiny = moe_families.tiny("olmoe", "fusedmoe")
    experts = tiny.experts[0][1]
    explained = fusedmoe_transformers.explain(experts, tokens=16)
    assert [part[0] for part in explained.parts] == ["chain dispatch to combine"]
    assert "SwiGLU" in str(explained)
    explained = fm.explain(tiny.model, tokens=16)
    assert [group.kind for group in explained.groups] == ["OlmoeExperts"]
    assert explained.groups[0].names == tuple(name for name, _ in tiny.experts)
    experts.config = None  # which does not say how many experts a token gets
    with pytest.raises(fm.InputError, match="OlmoeExperts: top_k: expected the number of experts per token, got None"):
        fusedmoe_transformers.explain(experts, tokens=16)
    few, many = (fusedmoe_transformers.explain(experts, tokens=16, top_k=k).plans[0].kept_bytes for k in (1, 2))
    assert 0 < few < many
    tiny.model.set_experts_implementation("eager")
    assert [group.kind for group in fm.explain(tiny.model).groups] == []


def test_explain_of_a_part_of_the_experts():
    experts = Plain(config())
    experts.num_experts = 2 * E
    (group,) = fm.explain(experts).groups
    assert group.note.startswith(f"Plain: expected weights of {2 * E} experts, got {E}: plan before sharding")


# ---- around a model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "use_cache"), [("qwen3_moe", True), ("gpt_oss", False)])
def test_generate(family, use_cache):
    tokens = []
    for implementation in ("eager", "fusedmoe"):
        tiny = moe_families.tiny(family, implementation)
        settings = {"do_sample": False, "use_cache": use_cache, "pad_token_id": 0, "eos_token_id": None}
        tokens.append(tiny.model.generate(tiny.inputs["input_ids"], max_new_tokens=6, **settings))
    assert tokens[0].equal(tokens[1])
    assert tokens[0].shape[1] == moe_families.LENGTH + 6
    assert len(tokens[0][:, moe_families.LENGTH :].unique()) > 2


def test_every_way_to_ask_for_it(tmp_path):
    tiny = moe_families.tiny("qwen3_moe", "eager")
    want = step(tiny)
    tiny.model.save_pretrained(tmp_path)
    kind = type(tiny.model)
    loaded = kind.from_pretrained(tmp_path, experts_implementation="fusedmoe")
    by_auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="fusedmoe")
    made = transformers.AutoModelForCausalLM.from_config(tiny.model.config, experts_implementation="fusedmoe")
    made.load_state_dict(tiny.model.state_dict())
    switched = kind.from_pretrained(tmp_path)
    switched.set_experts_implementation("fusedmoe")
    for model in (loaded, by_auto, made, switched):
        assert model.config._experts_implementation == "fusedmoe"
        tiny.model = model.eval()
        assert_close(step(tiny), want, rtol=1e-4, atol=1e-6)
        experts = model.model.layers[0].mlp.experts
        assert expert_modules.OPS in experts.__dict__
        del experts.__dict__[expert_modules.OPS]
        model.set_experts_implementation("eager")
        moe_families.logits(tiny)
        assert expert_modules.OPS not in experts.__dict__


# ---- Llama-4 ------------------------------------------------------------------------------------------------------


def llama4(dtype=torch.float64):
    tiny = moe_families.tiny("llama4", None, dtype, num_experts_per_tok=2)
    return tiny, tiny.model.model.layers[0].feed_forward


def test_llama4_there_and_back():
    tiny, layer = llama4()
    want, own = step(tiny), tiny.model
    keys = own.state_dict().keys()
    assert fusedmoe_transformers.patch_llama4(own) == fusedmoe_transformers.patch_llama4(own) == 2
    assert own.state_dict().keys() == keys
    assert [group.kind for group in fm.explain(own, tokens=16).groups] == ["Llama4TextExperts"]
    assert_close(step(tiny), want, **EXACT)
    assert all(expert_modules.OPS in module.__dict__ for _, module in tiny.experts)
    for tiny.model in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        copied = tiny.model.model.layers[0].feed_forward
        assert copied.forward.args[0] is copied
        assert copied.experts.forward.args[0] is copied.experts
        assert_close(step(tiny), want, **EXACT)
        for parameter in tiny.model.parameters():
            parameter.data.zero_()
    tiny.model = own
    assert_close(step(tiny), want, **EXACT)
    assert fusedmoe_transformers.unpatch_llama4(own) == 2
    assert fusedmoe_transformers.unpatch_llama4(own) == 0
    assert not fm.explain(own).groups
    assert "forward" not in vars(layer)
    assert_close(step(tiny), want, rtol=0, atol=0)


def test_llama4_returns_the_routers_logits_and_runs_its_hooks():
    tiny, layer = llama4()
    x = torch.randn(2, 5, 64, dtype=torch.float64)
    want = layer(x)
    fusedmoe_transformers.patch_llama4(tiny.model)
    ran = []
    layer.experts.register_forward_hook(lambda *args: ran.append("experts"))
    layer.router.register_forward_hook(lambda *args: ran.append("router"))
    got = layer(x)
    assert ran == ["router", "experts"]
    torch.testing.assert_close(got, want)
    assert got[0].shape == (10, 64)
    assert got[1].shape == (10, 8)


def test_llama4_errors():
    with pytest.raises(fm.InputError, match="Llama4TextMoe layers, got Linear"):
        fusedmoe_transformers.patch_llama4(nn.Linear(2, 2))
    tiny, first = llama4()
    layer = tiny.model.model.layers[1].feed_forward
    layer.forward = types.MethodType(type(layer).forward, layer)
    with pytest.raises(fm.InputError, match=r"'model.layers.1.feed_forward' was already replaced"):
        fusedmoe_transformers.patch_llama4(tiny.model)
    assert "forward" not in vars(first)


# ---- the page, and no transformers --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_has_the_table_of_families():
    text = families_page.PAGE.read_text("utf-8")
    if families_page.CAPTION.format(version=transformers.__version__) not in text:
        pytest.skip("the page is of another version of transformers")
    assert families_page.TABLE.search(text)[0] == families_page.table()


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)  # as for an absent or an old transformers
    with pytest.raises(ImportError, match=r"transformers 5\.7 or newer: pip install 'fusedmoe\[transformers\]'"):
        fusedmoe_transformers.register()
