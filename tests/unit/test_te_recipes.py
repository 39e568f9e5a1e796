"""Transformer Engine's recipes: stand-ins with its names and fields, and its own file where it is installed."""

import dataclasses
import importlib.metadata
import importlib.util
import logging
import subprocess
import sys
from enum import Enum
from typing import Any

import pytest
import torch

import fusedmoe as fm
from fusedmoe.numerics.formats import Delayed
from fusedmoe.numerics.recipes import MXFP8, NVFP4, FP8Block, FP8Tensor, resolve


class Format(Enum):
    E2M1 = "e2m1"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


@dataclasses.dataclass(frozen=True)
class QParams:
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


@dataclasses.dataclass(frozen=True)
class MMParams:
    use_split_accumulator: bool = True


@dataclasses.dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Any = None


@dataclasses.dataclass
class Float8CurrentScaling:
    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp = QParams()  # no fields, as theirs are none
    fp8_quant_fwd_weight = QParams()
    fp8_quant_bwd_grad = QParams()
    fp8_gemm_fprop: MMParams = MMParams(False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Any = None


@dataclasses.dataclass
class MXFP8BlockScaling:
    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Any = None
    enable_2d_quantization: bool = False


@dataclasses.dataclass
class Float8BlockScaling:
    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp = QParams(power_2_scale=True)
    fp8_quant_fwd_weight = QParams(power_2_scale=True)
    fp8_quant_bwd_grad = QParams(power_2_scale=True)
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_dpa: bool = False
    backward_override: Any = None


@dataclasses.dataclass
class NVFP4BlockScaling:
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    backward_override: Any = None

    def __post_init__(self):
        rotated, rounded = not self.disable_rht, not self.disable_stochastic_rounding
        self.fp4_quant_fwd_inp = QParams(random_hadamard_transform=rotated)
        self.fp4_quant_fwd_weight = QParams(fp4_2d_quantization=not self.disable_2d_quantization)
        self.fp4_quant_bwd_grad = QParams(random_hadamard_transform=rotated, stochastic_rounding=rounded)


@dataclasses.dataclass
class CustomRecipe:
    qfactory: Any = None
    fp8_format: Format = Format.HYBRID


def params(**fields):
    """The same parameters for rows, weights and gradients."""
    return {f"fp8_quant_{role}": QParams(**fields) for role in ("fwd_inp", "fwd_weight", "bwd_grad")}


def fp4_params(fwd_inp=(), fwd_weight=(), bwd_grad=()):
    """Parameters that were set on the recipe afterwards."""
    given = {"fwd_inp": fwd_inp, "fwd_weight": fwd_weight, "bwd_grad": bwd_grad}
    return {f"fp4_quant_{role}": QParams(**dict(fields)) for role, fields in given.items()}


OURS = [
    ("DelayedScaling", {}, FP8Tensor(delayed=Delayed(1024))),
    (
        "DelayedScaling",
        {"margin": 2, "amax_history_len": 16, "amax_compute_algo": "most_recent", "fp8_format": "E4M3"},
        FP8Tensor(hybrid=False, delayed=Delayed(16, most_recent=True, margin=2)),
    ),
    ("DelayedScaling", {"reduce_amax": False, "fp8_dpa": True}, FP8Tensor(delayed=Delayed(1024))),
    ("Float8CurrentScaling", {}, FP8Tensor()),
    ("Float8CurrentScaling", {"fp8_format": "E4M3"}, FP8Tensor(hybrid=False)),
    ("Float8CurrentScaling", params(power_2_scale=True), FP8Tensor(power_of_two=True)),
    ("MXFP8BlockScaling", {}, MXFP8()),
    ("MXFP8BlockScaling", {"fp8_format": "HYBRID"}, MXFP8(hybrid=True)),
    ("MXFP8BlockScaling", {"enable_2d_quantization": True}, MXFP8(weight_2d=True)),
    ("Float8BlockScaling", {}, FP8Block()),
    ("Float8BlockScaling", {"fp8_format": "HYBRID"}, FP8Block(hybrid=True)),
    ("Float8BlockScaling", params(power_2_scale=False), FP8Block(power_of_two=False)),
    ("Float8BlockScaling", params(power_2_scale=True, amax_epsilon=1e-4), FP8Block(amax_epsilon=1e-4)),
    # the flag alone changes nothing there: what their layers go by are the parameters
    ("Float8CurrentScaling", {"use_power_2_scales": True}, FP8Tensor()),
    ("Float8BlockScaling", {"use_f32_scales": True}, FP8Block()),
    ("NVFP4BlockScaling", {}, NVFP4()),
    ("NVFP4BlockScaling", {"disable_rht": True}, NVFP4(hadamard=False)),
    ("NVFP4BlockScaling", {"disable_stochastic_rounding": True}, NVFP4(stochastic_rounding=False)),
    ("NVFP4BlockScaling", {"disable_2d_quantization": True}, NVFP4(weight_2d=False)),
    ("NVFP4BlockScaling", {"nvfp4_4over6_err_mode": "MSE"}, NVFP4()),
    ("NVFP4BlockScaling", fp4_params(), NVFP4(hadamard=False, stochastic_rounding=False, weight_2d=False)),
    ("NVFP4BlockScaling", fp4_params(bwd_grad={"stochastic_rounding": True}), NVFP4(hadamard=False, weight_2d=False)),
    (
        "NVFP4BlockScaling",
        fp4_params(fwd_inp={"random_hadamard_transform": True}, bwd_grad={"random_hadamard_transform": True}),
        NVFP4(stochastic_rounding=False, weight_2d=False),
    ),
]

REFUSED = [
    ("DelayedScaling", {"backward_override": "dequantized"}, "backward_override: expected None, got 'dequantized'"),
    ("DelayedScaling", {"amax_compute_algo": max}, "amax_compute_algo: expected 'max' or 'most_recent', got <built-in"),
    ("DelayedScaling", {"scaling_factor_compute_algo": max}, "scaling_factor_compute_algo: expected None, got <built"),
    ("Float8CurrentScaling", {"backward_override": "high_precision"}, "backward_override: expected None, got 'high"),
    ("MXFP8BlockScaling", {"backward_override": "dequantized"}, "backward_override: expected None"),
    ("MXFP8BlockScaling", {"margin": 1}, "margin: expected 0, got 1"),
    ("Float8BlockScaling", {"backward_override": "dequantized"}, "backward_override: expected None"),
    ("Float8BlockScaling", {"x_block_scaling_dim": 2}, "x_block_scaling_dim: expected 1, got 2"),
    ("Float8BlockScaling", {"grad_block_scaling_dim": 2}, "grad_block_scaling_dim: expected 1, got 2"),
    ("Float8BlockScaling", {"w_block_scaling_dim": 1}, "w_block_scaling_dim: expected 2, got 1"),
    ("NVFP4BlockScaling", {"backward_override": "dequantized"}, "backward_override: expected None"),
    ("NVFP4BlockScaling", {"row_scaled_activation": True}, "row_scaled_activation: expected False, got True"),
    ("NVFP4BlockScaling", {"nvfp4_4over6": "weights"}, "nvfp4_4over6: expected 'none', got 'weights'"),
    (
        "NVFP4BlockScaling",
        fp4_params(fwd_inp={"random_hadamard_transform": True}),
        "fp4_quant_bwd_grad.random_hadamard_transform: expected True, got False",
    ),
    (
        "NVFP4BlockScaling",
        fp4_params(fwd_inp={"stochastic_rounding": True}),
        "fp4_quant_fwd_inp.stochastic_rounding: expected False, got True",
    ),
    (
        "NVFP4BlockScaling",
        fp4_params(fwd_weight={"random_hadamard_transform": True}),
        "fp4_quant_fwd_weight.random_hadamard_transform: expected False, got True",
    ),
    (
        "NVFP4BlockScaling",
        fp4_params(bwd_grad={"fp4_2d_quantization": True}),
        "fp4_quant_bwd_grad.fp4_2d_quantization: expected False, got True",
    ),
    (
        "NVFP4BlockScaling",
        fp4_params(fwd_inp={"amax_epsilon": 1e-4}),
        "fp4_quant_fwd_inp.amax_epsilon: expected 0.0, got 0.0001",
    ),
]


def made(module, kind, fields):
    """A recipe of that class, formats by the module's own enumeration."""
    flags = {name: value for name, value in fields.items() if name.startswith("disable_")}
    recipe = module[kind](**flags)
    for name, value in fields.items():  # afterwards: some of what is refused here, theirs refuses at once
        setattr(recipe, name, getattr(module["Format"], value) if name == "fp8_format" else value)
    return recipe


@pytest.mark.parametrize(("kind", "fields", "ours"), OURS, ids=str)
def test_each_of_theirs_is_one_of_ours(kind, fields, ours):
    assert resolve(made(globals(), kind, fields)) == ours
    with fm.recipe(made(globals(), kind, fields)) as found:
        assert found == ours


@pytest.mark.parametrize("make", [fm.GroupedLinear, lambda _, *sizes, **o: fm.Linear(*sizes, **o)], ids=["grouped", ""])
def test_one_of_theirs_may_be_a_layers_own(make):
    x, named = torch.randn(6, 32), {"splits": torch.tensor([2, 4])} if make is fm.GroupedLinear else {}
    layer = make(2, 32, 32, recipe=Float8BlockScaling())  # which cannot be hashed
    assert layer.recipe == FP8Block()
    layer.recipe = MXFP8BlockScaling(enable_2d_quantization=True)
    got = layer(x, **named)
    layer.recipe = MXFP8(weight_2d=True)
    assert torch.equal(layer(x, **named), got)
    layer.recipe = None
    assert not torch.equal(layer(x, **named), got)


@pytest.mark.parametrize(("kind", "fields", "message"), REFUSED, ids=str)
def test_what_there_is_not_is_refused_by_name(kind, fields, message):
    with pytest.raises(fm.InputError, match=f"recipe {kind}: {message}"):
        resolve(made(globals(), kind, fields))


FP8 = ["DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "Float8BlockScaling"]


@pytest.mark.parametrize("kind", FP8)
def test_all_of_it_in_e5m2_is_refused(kind):
    with pytest.raises(fm.InputError, match=f"recipe {kind}: fp8_format: expected E4M3 or HYBRID, got E5M2"):
        resolve(globals()[kind](fp8_format=Format.E5M2))


@pytest.mark.parametrize("kind", [*FP8, "NVFP4BlockScaling"])
def test_a_field_that_is_new_is_refused_by_name(kind):
    newer = dataclasses.make_dataclass("Newer", [("sparse", bool, True)], bases=(globals()[kind],))
    with pytest.raises(fm.InputError, match="recipe Newer: sparse: a field that fusedmoe does not know; got True"):
        resolve(newer())


@pytest.mark.parametrize(("kind", "fields", "ours"), OURS, ids=str)
def test_a_subclass_is_known_by_its_base(kind, fields, ours):
    class Mine(globals()[kind]):
        """Fields as there."""

    assert resolve(made({"Format": Format, "Mine": Mine}, "Mine", fields)) == ours


def test_a_flag_is_what_there_is_to_go_by_where_there_are_no_parameters():
    class Float8CurrentScaling:
        use_power_2_scales = True

    class Float8BlockScaling:
        use_f32_scales = True

    current, block = Float8CurrentScaling(), Float8BlockScaling()
    current.use_power_2_scales = block.use_f32_scales = True
    assert resolve(current) == FP8Tensor(power_of_two=True)
    assert resolve(block) == FP8Block(power_of_two=False)


def test_parameters_have_to_agree():
    def one(kind, **fields):
        return made(globals(), kind, {"fp8_quant_fwd_inp": QParams(**fields)})

    with pytest.raises(fm.InputError, match="recipe Float8BlockScaling: amax_epsilon: expected the same for all"):
        resolve(one("Float8BlockScaling", power_2_scale=True, amax_epsilon=1e-4))
    with pytest.raises(fm.InputError, match="recipe Float8BlockScaling: power_2_scale: expected the same for all"):
        resolve(one("Float8BlockScaling", power_2_scale=False))
    with pytest.raises(fm.InputError, match=r"recipe Float8CurrentScaling: amax_epsilon: expected 0.0, got 0.0001"):
        resolve(made(globals(), "Float8CurrentScaling", params(amax_epsilon=1e-4)))


def test_a_factory_of_quantizers_is_no_recipe_here():
    with pytest.raises(fm.InputError, match=r"a recipe of Transformer Engine, .* got CustomRecipe"):
        resolve(CustomRecipe())


def test_a_recipe_of_theirs_computes_what_ours_does():
    fc, x = fm.GroupedLinear(2, 64, 32), torch.randn(12, 64)
    results = []
    for recipe in (MXFP8BlockScaling(), "mxfp8", None):
        with fm.recipe("bf16" if recipe is None else recipe):
            results.append(fc(x, splits=torch.tensor([5, 7])))
    assert torch.equal(*results[:2])
    assert not torch.equal(*results[1:])


@pytest.mark.parametrize(("reduces", "ranks"), [(True, True), (False, True), (True, False)])
def test_an_amax_that_is_not_reduced_over_ranks_is_said_once(reduces, ranks, monkeypatch, caplog):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: ranks)
    with caplog.at_level(logging.WARNING, "fusedmoe"):
        for _ in range(2):
            resolve(DelayedScaling(reduce_amax=reduces))
    said = [r.getMessage() for r in caplog.records if "reduce_amax" in r.getMessage()]
    assert len(said) == (reduces and ranks)


def test_transformer_engine_is_not_imported():
    script = (
        "import sys, fusedmoe as fm\n"
        "class MXFP8BlockScaling: pass\n"
        "with fm.recipe(MXFP8BlockScaling()) as ours: assert ours.name == 'mxfp8'\n"
        "assert not any(name.split('.')[0].startswith('transformer_engine') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# --- their own file ------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(("kind", "fields", "ours"), OURS, ids=str)
def test_their_own_recipes_are_ours(kind, fields, ours, theirs):
    assert resolve(made(theirs, kind, fields)) == ours


@pytest.mark.parametrize(("kind", "fields", "message"), REFUSED, ids=str)
def test_their_own_fields_are_refused_by_name(kind, fields, message, theirs):
    with pytest.raises(fm.InputError, match=f"recipe {kind}: {message}"):
        resolve(made(theirs, kind, fields))


def test_their_own_roles_are_ours(theirs):
    """Which operand is rotated, rounded at random, or shares scales in two directions."""
    for fields in ({}, {"disable_rht": True, "disable_stochastic_rounding": True, "disable_2d_quantization": True}):
        recipe = theirs["NVFP4BlockScaling"](**fields)
        ours = resolve(recipe).roles()
        params = (recipe.fp4_quant_fwd_inp, recipe.fp4_quant_fwd_weight, recipe.fp4_quant_bwd_grad)
        for quantizer, param in zip((ours.input, ours.weight, ours.grad), params, strict=True):
            assert quantizer.hadamard is param.random_hadamard_transform
            assert quantizer.stochastic_rounding is param.stochastic_rounding
            assert (quantizer.format.block[0] == 16) is param.fp4_2d_quantization


def test_their_base_class_and_custom_recipes_are_none_of_ours(theirs):
    with pytest.raises(fm.InputError, match=r"expected a Recipe, a recipe of Transformer Engine"):
        resolve(theirs["CustomRecipe"](qfactory=lambda role: None))


@pytest.mark.parametrize("kind", [*FP8, "NVFP4BlockScaling"])
def test_the_stand_ins_have_their_fields_and_defaults(kind, theirs):
    """So that what the tests above say holds of the real ones."""

    def plain(value):
        return value.name if isinstance(value, Enum) else vars(value) if hasattr(value, "__dict__") else value

    stand_in, real = globals()[kind](), theirs[kind]()
    assert {f.name for f in dataclasses.fields(stand_in)} <= {f.name for f in dataclasses.fields(real)}
    for name in [*(f.name for f in dataclasses.fields(stand_in)), *(n for n in params() if hasattr(stand_in, n))]:
        mine, other = plain(getattr(stand_in, name)), plain(getattr(real, name))
        assert mine == ({k: other[k] for k in mine} if isinstance(mine, dict) else other), name
