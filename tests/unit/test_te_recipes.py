"""Transformer Engine's recipes: each of its classes is one of ours, or is refused with the field that is not."""

import dataclasses
import importlib.metadata
import importlib.util
import logging
import sys

import pytest
import torch

import fusedmoe as fm
from fusedmoe.numerics.formats import Delayed
from fusedmoe.numerics.recipes import MXFP8, NVFP4, FP8Block, FP8Tensor, resolve

FILE = "transformer_engine/common/recipe/__init__.py"


@pytest.fixture(scope="module")
def theirs():
    """The module of their recipes by itself: the package around it wants its compiled library."""
    pytest.importorskip("pydantic")
    try:
        files = importlib.metadata.files("transformer-engine") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = next((file for file in files if file.as_posix() == FILE), None)
    if found is None:
        pytest.skip("transformer-engine is not installed")
    spec = importlib.util.spec_from_file_location("recipes_of_transformer_engine", found.locate())
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # its annotations are looked up there
        spec.loader.exec_module(module)
        yield vars(module)


def params(**fields):
    """The same parameters for rows, weights and gradients."""
    return {f"fp8_quant_{role}": dict(fields) for role in ("fwd_inp", "fwd_weight", "bwd_grad")}


def fp4_params(fwd_inp=(), fwd_weight=(), bwd_grad=()):
    """Parameters that were set on the recipe afterwards."""
    given = {"fwd_inp": fwd_inp, "fwd_weight": fwd_weight, "bwd_grad": bwd_grad}
    return {f"fp4_quant_{role}": dict(fields) for role, fields in given.items()}


DELAYED, CURRENT = "DelayedScaling", "Float8CurrentScaling"
BLOCK, MX, NV = "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"
HADAMARD = {"random_hadamard_transform": True}

OURS = [
    (DELAYED, {}, FP8Tensor(delayed=Delayed(1024))),
    (
        DELAYED,
        {"margin": 2, "amax_history_len": 16, "amax_compute_algo": "most_recent", "fp8_format": "E4M3"},
        FP8Tensor(hybrid=False, delayed=Delayed(16, most_recent=True, margin=2)),
    ),
    (CURRENT, {}, FP8Tensor()),
    (CURRENT, params(power_2_scale=True), FP8Tensor(power_of_two=True)),
    (MX, {}, MXFP8()),
    (MX, {"fp8_format": "HYBRID"}, MXFP8(hybrid=True)),
    (MX, {"enable_2d_quantization": True}, MXFP8(weight_2d=True)),
    (BLOCK, {}, FP8Block()),
    (BLOCK, {"fp8_format": "HYBRID"}, FP8Block(hybrid=True)),
    (BLOCK, params(power_2_scale=True, amax_epsilon=1e-4), FP8Block(amax_epsilon=1e-4)),
    # the flag alone changes nothing there: what their layers go by are the parameters
    (CURRENT, {"use_power_2_scales": True}, FP8Tensor()),
    (BLOCK, {"use_f32_scales": True}, FP8Block()),
    (NV, {}, NVFP4()),
    (NV, {"disable_rht": True}, NVFP4(hadamard=False)),
    (NV, {"disable_stochastic_rounding": True}, NVFP4(stochastic_rounding=False)),
    (NV, {"disable_2d_quantization": True}, NVFP4(weight_2d=False)),
    (NV, fp4_params(), NVFP4(hadamard=False, stochastic_rounding=False, weight_2d=False)),
    (NV, fp4_params(bwd_grad={"stochastic_rounding": True}), NVFP4(hadamard=False, weight_2d=False)),
    (NV, fp4_params(fwd_inp=HADAMARD, bwd_grad=HADAMARD), NVFP4(stochastic_rounding=False, weight_2d=False)),
]

REFUSED = [
    (DELAYED, {"backward_override": "dequantized"}, "backward_override: expected None, got 'dequantized'"),
    (DELAYED, {"amax_compute_algo": max}, "amax_compute_algo: expected 'max' or 'most_recent', got <built-in"),
    (DELAYED, {"scaling_factor_compute_algo": max}, "scaling_factor_compute_algo: expected None, got <built"),
    (MX, {"margin": 1}, "margin: expected 0, got 1"),
    (BLOCK, {"x_block_scaling_dim": 2}, "x_block_scaling_dim: expected 1, got 2"),
    (BLOCK, {"w_block_scaling_dim": 1}, "w_block_scaling_dim: expected 2, got 1"),
    (NV, {"row_scaled_activation": True}, "row_scaled_activation: expected False, got True"),
    (NV, {"nvfp4_4over6": "weights"}, "nvfp4_4over6: expected 'none', got 'weights'"),
    (NV, fp4_params(fwd_inp=HADAMARD), "fp4_quant_bwd_grad.random_hadamard_transform: expected True, got False"),
    (NV, fp4_params(bwd_grad={"fp4_2d_quantization": True}), "fp4_quant_bwd_grad.fp4_2d_quantization: expected False"),
    (NV, fp4_params(fwd_inp={"amax_epsilon": 1e-4}), "fp4_quant_fwd_inp.amax_epsilon: expected 0.0, got 0.0001"),
    # parameters have to agree
    (BLOCK, {"fp8_quant_fwd_inp": {"power_2_scale": True, "amax_epsilon": 1e-4}}, "amax_epsilon: expected the"),
    (CURRENT, params(amax_epsilon=1e-4), "amax_epsilon: expected 0.0, got 0.0001"),
    *[(kind, {"fp8_format": "E5M2"}, "fp8_format: expected E4M3 or HYBRID") for kind in (DELAYED, CURRENT, MX, BLOCK)],
]


def made(module, kind, fields, new=None):
    """A recipe of that class, or of a subclass with new fields; formats and parameters are the module's own."""
    kind = module[kind] if new is None else dataclasses.make_dataclass("Newer", new, bases=(module[kind],))
    recipe = kind(**{name: value for name, value in fields.items() if name.startswith("disable_")})
    for name, value in fields.items():  # afterwards: some of what is refused here, theirs refuses at once
        if name == "fp8_format":
            value = getattr(module["Format"], value)
        elif "_quant_" in name:
            value = module["QParams"](**value)
        setattr(recipe, name, value)
    return recipe


@pytest.mark.parametrize(("kind", "fields", "ours"), OURS, ids=str)
def test_each_of_theirs_is_one_of_ours(kind, fields, ours, theirs):
    assert resolve(made(theirs, kind, fields)) == ours
    with fm.recipe(made(theirs, kind, fields, new=[])) as found:  # a subclass is known by its base
        assert found == ours


@pytest.mark.parametrize(("kind", "fields", "message"), REFUSED, ids=str)
def test_other_values_are_refused_by_name(kind, fields, message, theirs):
    with pytest.raises(fm.InputError, match=f"recipe {kind}: {message}"):
        resolve(made(theirs, kind, fields))


def test_a_field_that_is_new_is_refused_by_name(theirs):
    with pytest.raises(fm.InputError, match="recipe Newer: sparse: a field that fusedmoe does not know; got True"):
        resolve(made(theirs, MX, {}, new=[("sparse", bool, True)]))


def test_one_of_theirs_may_be_a_layers_own(theirs):
    x, named = torch.randn(6, 32), {"splits": torch.tensor([2, 4])}
    layer = fm.GroupedLinear(2, 32, 32, recipe=theirs[BLOCK]())  # which cannot be hashed
    assert layer.recipe == FP8Block()
    layer.recipe = made(theirs, MX, {"enable_2d_quantization": True})
    got = layer(x, **named)
    layer.recipe = MXFP8(weight_2d=True)
    assert torch.equal(layer(x, **named), got)
    layer.recipe = None
    assert not torch.equal(layer(x, **named), got)


def test_an_older_field_chooses_the_weight_gradient(theirs):
    def older(value):
        return made(theirs, DELAYED, {}, new=[("override_linear_precision", object, value)])

    for override, wgrad in (((False, False, False), "quantized"), ((False, False, True), "bf16")):
        assert resolve(older(override)) == FP8Tensor(delayed=Delayed(1024), wgrad=wgrad)
    for override in ((True, False, True), (False, True, False), None, (True, True)):
        with pytest.raises(fm.InputError, match=r"recipe Newer: override_linear_precision: expected \(False, .* got "):
            resolve(older(override))


def test_a_flag_counts_where_there_are_no_parameters():
    class Float8CurrentScaling:
        def __init__(self):
            self.use_power_2_scales = True

    class Float8BlockScaling:
        def __init__(self):
            self.use_f32_scales = True

    assert resolve(Float8CurrentScaling()) == FP8Tensor(power_of_two=True)
    assert resolve(Float8BlockScaling()) == FP8Block(power_of_two=False)


@pytest.mark.parametrize(("reduces", "ranks"), [(True, True), (False, True), (True, False)])
def test_an_amax_that_is_not_reduced_over_ranks_is_said_once(reduces, ranks, monkeypatch, caplog, theirs):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: ranks)
    with caplog.at_level(logging.WARNING, "fusedmoe"):
        for _ in range(2):
            resolve(made(theirs, DELAYED, {"reduce_amax": reduces}))
    said = [r.getMessage() for r in caplog.records if "reduce_amax" in r.getMessage()]
    assert len(said) == (reduces and ranks)
