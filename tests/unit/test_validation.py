"""Every public constructor and function refuses hostile values by an `InputError` that names the argument: when it is
given one, and when one is set as an attribute later.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

import fusedmoe as fm
from fusedmoe.base.checks import reserved
from fusedmoe.integrations import transformer_engine, transformers
from fusedmoe.numerics.formats import (
    E2M1,
    E4M3,
    Delayed,
    Element,
    Format,
    ScaleRule,
    fp8_block,
    fp8_row,
    fp8_tensor,
    mxfp8,
)
from fusedmoe.numerics.recipes import MXFP8, NVFP4, Custom, FP8Block, FP8Row, FP8Tensor
from fusedmoe.ops.derived import CHECKED, DERIVED

NAN, INF = math.nan, math.inf
NO_INTEGERS = [0, -1, True, 1.5, 2.0, NAN, "7", None, [2], torch.tensor(2), np.float32(2), np.bool_(True)]
NO_FLAGS = ["no", "yes", 0, 1, None, 1.0, [], torch.tensor(True), np.int64(1)]
NO_NUMBERS = [NAN, INF, -INF, "7", True, [1.0], 1j, torch.tensor(1.0)]
NO_POSITIVE = [0, -1, -0.5, *NO_NUMBERS]
NO_TEXTS = [None, 3, b"probs", True, ["probs"]]
NO_WGRADS = ["fp16", "BF16", "", None, True, torch.bfloat16, ["bf16"]]
RESERVED = [
    "output", "input", "weight", "bias", "offsets", "columns", "none", "self", "arch", "splits", "row_of_slot",
    "slot_of_row", "token_of_row", "expert_index", "checked_row_of_slot", "checked_slot_of_row", "grad_input", "grad_x",
    "a.b", "0.output", "", "two words", "1st",
]  # fmt: skip


def router(**kwargs):
    return fm.Router(**({"hidden": 8, "num_experts": 4, "top_k": 2} | kwargs))


def moe(**kwargs):
    return fm.MoE(**({"hidden": 8, "intermediate": 4, "num_experts": 4, "top_k": 2} | kwargs))


def grouped(**kwargs):
    return fm.GroupedLinear(**({"num_groups": 2, "in_features": 4, "out_features": 4} | kwargs))


def linear(**kwargs):
    return fm.Linear(**({"in_features": 4, "out_features": 4} | kwargs))


def sequential(**kwargs):
    return fm.Sequential(grouped(), **kwargs)


def lora(**kwargs):
    return fm.GroupedLoRA(grouped(), **({"rank": 2} | kwargs))


def format_of(**kwargs):
    return Format(**({"name": "mine", "element": E4M3, "block": (1, 32), "rule": ScaleRule.RCEIL} | kwargs))


def element(**kwargs):
    given = {"name": "e", "bits": 8, "max": 448.0, "max_exponent": 8, "dtype": torch.float8_e4m3fn}
    return Element(**(given | kwargs))


def without(values, *taken):
    return [v for v in values if not any(v is t for t in taken)]


NO_QUANTIZERS = ["mxfp9", "bf16", 3, True, E4M3, ["mxfp8"]]
NO_DEVICES = ["cudaa", 1.5, True, [], torch.float32]
NO_DTYPES = ["bf16", torch.int32, torch.float8_e4m3fn, torch.bool, float, 16]
OF_ROUTER = {
    "score": ["softmaxx", 3, None, ["softmax"]],
    "renormalize": NO_FLAGS,
    "scale": [None, *NO_NUMBERS],
}
OF_MAKER = {"device": NO_DEVICES, "dtype": NO_DTYPES}
OF_GLU = {
    "limit": without(NO_POSITIVE, None),
    "alpha": [None, *NO_POSITIVE],
    "offset": [None, *NO_NUMBERS],
    "interleaved": NO_FLAGS,
}
NO_ELEMENTS = ["e4m3", None, 8, E2M1]
OF_FP8 = {"element": NO_ELEMENTS, "power_of_two": NO_FLAGS, "amax_epsilon": [-1.0, None, *NO_NUMBERS]}
SIZES = dict.fromkeys(("num_groups", "in_features", "out_features"), NO_INTEGERS)
OPTIONS = {
    "sm_margin": [-1, True, 1.5, "8", None, NAN],
    "schedule": ["dynamical", None, 3, ["static"], np.array(["a"])],
}

# each with hostile values for its arguments
CONSTRUCTORS = {
    grouped: SIZES | OF_MAKER | {"bias": NO_FLAGS, "accumulate_into_main_grad": NO_FLAGS, "recipe": ["fp9", 3, [1]]},
    linear: {k: v for k, v in SIZES.items() if k != "num_groups"} | OF_MAKER | {"bias": NO_FLAGS},
    fm.SwiGLU: OF_GLU,
    fm.ReGLU: OF_GLU,
    fm.GeGLU: OF_GLU | {"approximate": ["tan", None, True, 1, ["tanh"]]},
    fm.Scale: {"name": [*RESERVED, *NO_TEXTS]},
    fm.Dispatch: {"num_experts": without(NO_INTEGERS, None)},
    fm.Combine: {"weights": [*RESERVED, *without(NO_TEXTS, None)]},
    fm.Quantize: dict.fromkeys(("forward", "backward", "weight"), NO_QUANTIZERS),
    router: OF_ROUTER | OF_MAKER | dict.fromkeys(("hidden", "num_experts", "top_k", "num_groups"), NO_INTEGERS)
    | {"bias": NO_FLAGS, "balance_bias": without(NO_FLAGS, None), "top_groups": NO_INTEGERS},
    moe: OF_ROUTER | OF_MAKER | OPTIONS
    | dict.fromkeys(("hidden", "intermediate", "num_experts", "top_k", "num_groups", "top_groups"), NO_INTEGERS)
    | dict.fromkeys(("bias", "router_bias", "shared_gate"), NO_FLAGS)
    | {"balance_bias": without(NO_FLAGS, None), "shared_intermediate": without(NO_INTEGERS, None)}
    | {"activation": ["relu6", None, 3, nn.ReLU(), fm.SwiGLU, ["swiglu"], True]},
    sequential: OPTIONS,
    lora: {"rank": NO_INTEGERS, "alpha": without(NO_NUMBERS, None), "dtype": NO_DTYPES},
    format_of: {
        "name": NO_TEXTS,
        "element": ["e4m3", None, 8],
        "block": [None, 32, (1,), (1, 2, 3), (1, 0), (1, -32), (1, 1.5), (1, True), "ab", (None, 32)],
        "rule": ["rceil", None, 3],
        "tensor_scale": NO_FLAGS,
        "amax_epsilon": [-1.0, None, *NO_NUMBERS],
    },
    element: {
        "name": NO_TEXTS, "bits": NO_INTEGERS, "max": [None, *NO_POSITIVE], "max_exponent": [1.5, True, "8", None],
        "dtype": ["uint8", None, 8],
    },
    fp8_tensor: OF_FP8,
    fp8_row: OF_FP8,
    fp8_block: OF_FP8,
    mxfp8: {"element": NO_ELEMENTS, "rule": ["rceil", None, 3, ScaleRule.FP32]},
    Delayed: {"history": NO_INTEGERS, "most_recent": NO_FLAGS, "margin": [1.5, True, "1", None, NAN]},
    lambda **kwargs: fm.Quantizer(**({"format": mxfp8()} | kwargs)): {
        "format": ["mxfp8", None, E4M3], "delayed": [True, 3], "stochastic_rounding": NO_FLAGS, "hadamard": NO_FLAGS,
        "wgrad": NO_WGRADS,
    },
    fm.Recipe: {"name": NO_TEXTS},
    FP8Tensor: {"hybrid": NO_FLAGS, "power_of_two": NO_FLAGS, "delayed": [True, 3], "wgrad": NO_WGRADS},
    FP8Row: {"hybrid": NO_FLAGS, "wgrad": NO_WGRADS},
    FP8Block: {"hybrid": NO_FLAGS, "wgrad": NO_WGRADS, "amax_epsilon": [-1.0, None, *NO_NUMBERS]},
    MXFP8: {"scale_rule": ["ceil", None, 3, ["rceil"]], "weight_2d": NO_FLAGS, "wgrad": NO_WGRADS},
    NVFP4: {"hadamard": NO_FLAGS, "stochastic_rounding": NO_FLAGS, "weight_2d": NO_FLAGS, "wgrad": NO_WGRADS},
    Custom: {"input": ["mxfp8", mxfp8(), 3], "weight": ["mxfp8", True]},
}  # fmt: skip

# they become no attributes of that name that may be set
ONLY_OPS = (grouped, linear, fm.SwiGLU, fm.ReGLU, fm.GeGLU, fm.Scale, fm.Dispatch, fm.Combine, router, sequential)
NOT_KEPT = {"bias", "device", "dtype", "balance_bias"}
ARGUMENTS = [(make, name) for make, arguments in CONSTRUCTORS.items() for name in arguments]
LATER = [(make, name) for make, name in ARGUMENTS if make in ONLY_OPS and name not in NOT_KEPT]
LATER += [(moe, name) for name in ("hidden", *OPTIONS)]


@pytest.mark.parametrize(("make", "name"), ARGUMENTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_constructor_refuses(make, name):
    for value in CONSTRUCTORS[make][name]:
        with pytest.raises(fm.InputError, match=f"{name}.*: expected "):
            make(**{name: value})


@pytest.mark.parametrize(("make", "name"), LATER, ids=lambda value: getattr(value, "__name__", value))
def test_an_attribute_that_is_set_later_is_refused_and_stays(make, name):
    module = make("probs") if make is fm.Scale else make()
    before = getattr(module, name)
    for value in CONSTRUCTORS[make][name]:
        with pytest.raises(fm.InputError, match=f"{name}.*: expected "):
            setattr(module, name, value)
        assert getattr(module, name) is before


def test_a_router_s_numbers_fit_together_also_later():
    r = router(num_experts=8, top_k=4)
    with pytest.raises(fm.InputError, match="top_k: expected 1 to num_experts=8, got 9"):
        r.top_k = 9
    with pytest.raises(fm.InputError, match="top_k: expected at most 2, the experts of 1 of 4 groups, got 4"):
        r.num_groups = 4
    assert (r.top_k, r.num_groups) == (4, 1)


def test_names_of_runtime_inputs_stay_as_they_were_made():
    """The layouts of Sequentials were derived from them."""
    with pytest.raises(fm.InputError, match="Scale: name: expected 'probs', which cannot be changed, got 'gate'"):
        fm.Scale("probs").name = "gate"
    with pytest.raises(fm.InputError, match="Combine: weights: expected 'probs', which cannot be changed, got None"):
        fm.Combine().weights = None


def test_reserved_names():
    """An op of a third party may not use them either."""
    assert len(DERIVED) >= 3
    assert all(map(reserved, DERIVED))

    class Mine(fm.SwiGLU):
        runtime_inputs = ("output",)

    with pytest.raises(fm.InputError, match=r"0\.Mine: runtime_inputs: expected identifiers other than 'input'"):
        fm.Sequential(Mine())(torch.ones(2, 2))


X = torch.ones(4, 8)
CODES = X.to(torch.float8_e4m3fn)
NO_VALUES = [X.int(), X.bool(), X + 0j, CODES]
ROWS = {"row_of_slot": torch.tensor([[0, 1], [2, 4]]), "slot_of_row": torch.arange(4), "probs": torch.rand(4)}
NO_MODULES = [None, 3, "model", torch.ones(1), nn.Linear]
FUNCTIONS = {
    "quantize x": (lambda v: fm.quantize(v, "mxfp8"), [None, 3, [1.0], np.ones((2, 2))], "x"),
    "quantize quantizer": (lambda v: fm.quantize(X, v), ["mxfp9", "bf16", None, 3, E4M3, ["mxfp8"], nn], "quantizer"),
    "quantize axis": (lambda v: fm.quantize(X, "mxfp8", v), [0, 1, None, True, -1.0, "rows"], "axis"),
    "quantize offsets": (lambda v: fm.quantize(X, "mxfp8", offsets=v), [[1, 4], 4, torch.ones(2)], "offsets"),
    "quantize encode": (lambda v: fm.quantize(X, "fp8_tensor", encode=v), [1.0, [1.0], torch.ones(3)], "encode"),
    "quantize generator": (lambda v: fm.quantize(X, "mxfp8", generator=v), [0, True, "cpu"], "generator"),
    "explain model": (fm.explain, NO_MODULES, "model"),
    "explain tokens": (lambda v: fm.explain(moe(), v), NO_INTEGERS, "tokens"),
    "explain arch": (lambda v: fm.explain(moe(), arch=v), ["h100", 9.5, True, -1, [90]], "arch"),
    "explain dtype": (lambda v: fm.explain(moe(), arch=90, dtype=v), ["bf16", torch.int32, 16], "dtype"),
    "keep_in_bf16 model": (fm.keep_in_bf16, NO_MODULES, "model"),
    "keep_in_bf16 first": (lambda v: fm.keep_in_bf16(moe(), first=v), [-1, 2, True, 1.0, "1", None], "first"),
    "weight_cache_bytes": (fm.weight_cache_bytes, NO_MODULES, "module"),
    "clear_weight_cache": (fm.clear_weight_cache, NO_MODULES, "module"),
    "recipe": (fm.recipe, [None, "fp9", 3, True, ["mxfp8"], np.array(["mxfp8", "a"]), MXFP8], "recipe"),
    "disabled": (fm.disabled, [None, 3, ["sm90.*"], b"sm90.*"], "patterns"),
    "strict": (fm.strict, NO_FLAGS, "enabled"),
    "strict unavailable": (lambda v: fm.strict(unavailable=v), NO_FLAGS, "unavailable"),
    "load_balancing_loss logits": (
        lambda v: fm.transformers_load_balancing_loss(v, 1), [None, 3, [], [None], X, [X, 3], [X + 0j], [X, X.int()]],
        "router_logits",
    ),
    "load_balancing_loss top_k": (lambda v: fm.transformers_load_balancing_loss([X], v), NO_INTEGERS, "top_k"),
    "load_balancing_loss mask": (
        lambda v: fm.transformers_load_balancing_loss([X], 1, v), [3, [1, 1, 1, 1], torch.ones(3)], "attention_mask"
    ),
    "plot_expert_load": (
        fm.plot_expert_load, [None, 3, [], ["a"], torch.ones(0), X[0] + 0j, X[0] * NAN, X[0] * INF, -X[0]], "loads"
    ),
    "plot_expert_load axes": (
        lambda v: fm.plot_expert_load(X[0], axes=v), ["x", 3, np.array([None, None], dtype=object)], "axes"
    ),
    "GroupedLoRA layer": (lambda v: fm.GroupedLoRA(v, 2), [None, nn.Linear(2, 2), linear(), "layer"], "layer"),
    "Router x": (lambda v: router()(v), [None, [1.0], X[0], X.int(), CODES, torch.ones(2, 7)], "x"),
    "balance_bias": (lambda v: setattr(router(), "balance_bias", v), [torch.ones(3), 1.0], "balance_bias"),
    "MoE x": (lambda v: moe()(v), [None, [1.0], torch.tensor(1.0), CODES, torch.ones(2, 7), "x"], "x"),
    "MoE return_stats": (lambda v: moe()(X, return_stats=v), NO_FLAGS, "return_stats"),
    "MoE explain x": (lambda v: moe().explain(v), [None, torch.ones(2, 7)], "x"),
    "Sequential x": (lambda v: sequential()(v, splits=torch.tensor([1, 1])), [None, [1.0], 3], "x"),
    "op x": (lambda v: fm.SwiGLU()(v), [None, [1.0], 3], "x"),
    "SwiGLU dtype": (lambda v: fm.SwiGLU()(v), NO_VALUES, "x: "),
    "SquaredReLU dtype": (lambda v: fm.SquaredReLU()(v), NO_VALUES, "x: "),
    "Scale dtype": (lambda v: fm.Scale("probs")(v, probs=X[:, 0]), NO_VALUES, "x: "),
    "Scale factor dtype": (lambda v: fm.Scale("probs")(X, probs=v[:, 0]), NO_VALUES, "probs: "),
    "Combine dtype": (lambda v: fm.Combine()(v, **ROWS), NO_VALUES, "x: "),
    "Dispatch weights dtype": (
        lambda v: fm.Dispatch(2)(X, expert_index=torch.zeros(4, 1, dtype=torch.int64), expert_weight=v[:, :1]),
        NO_VALUES, "expert_weight: ",
    ),
    "update_bias load": (
        lambda v: router(balance_bias=True).update_bias(v), [None, [1, 2, 3, 4], torch.ones(3)], "load"
    ),
    "update_bias rate": (
        lambda v: router(balance_bias=True).update_bias(torch.ones(4), v), [None, -1e-3, *NO_NUMBERS], "rate"
    ),
    "parameters": (
        lambda v: sequential().without_parameters().forward_with(v, X), [3, "a", [1]], "parameters|'splits'"
    ),
    "parameter": (
        lambda v: sequential().without_parameters().forward_with({"0.weight": v}, X, splits=torch.tensor([1, 1])),
        [3, "a", [1.0]], "'0.weight'",
    ),
    "nothing among modules": (lambda v: fm.Sequential(fm.SwiGLU(), v)(X), [None], "1"),
    "transformers register": (transformers.register, NO_TEXTS, "name"),
    "to_te": (lambda v: transformer_engine.to_te(sequential(), v), without(NO_INTEGERS, None), "glu_interleave_size"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "values", "name"), FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_a_function_refuses(call, values, name):
    for value in values:
        with pytest.raises(fm.InputError, match=rf"({name}).*(expected|missing)"):
            call(value)


# ---- places that address memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bad", "expected"),
    [
        ("row_of_slot", torch.tensor([[0, 1], [2, -1]]), "indices from 0 to 4, for 4 rows, got -1"),
        ("row_of_slot", torch.tensor([[0, 1], [2, 5]]), "indices from 0 to 4, for 4 rows, got 5"),
        ("row_of_slot", torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), "int64, .* got torch.int32"),
        ("slot_of_row", torch.tensor([0, 1, 2, -3]), "indices from 0 to 3, for 4 rows, got -3"),
        ("slot_of_row", torch.tensor([0, 1, 2, 4]), "indices from 0 to 3, for 4 rows, got 4"),
        ("slot_of_row", torch.tensor([True] * 4), "int64, .* got torch.bool"),
    ],
)
def test_places_are_checked_on_a_cpu_and_under_debug(name, bad, expected, monkeypatch):
    for debug in ("0", "1"):
        monkeypatch.setenv("FUSEDMOE_DEBUG", debug)
        with pytest.raises(fm.InputError, match=f"Combine: {name}: expected {expected}"):
            fm.Combine()(torch.randn(4, 3), **(ROWS | {name: bad}))


def test_elsewhere_places_outside_address_no_memory(monkeypatch):
    """As on a GPU, where nothing is read on the host: they become sentinels, or the last row."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    rows = torch.empty(4, 3)
    of_slots = CHECKED["row_of_slot"].compute(torch.tensor([[0, -1], [7, 4], [3, -(2**40)]]), rows)
    assert of_slots.tolist() == [[0, 4], [4, 4], [3, 4]]
    of_rows = CHECKED["slot_of_row"].compute(torch.tensor([0, -1, 9, 2]), rows)
    assert of_rows.tolist() == [0, 3, 3, 2]


def test_what_dispatch_provides_is_not_checked_again():
    named = {"expert_index": torch.tensor([[0, 1]] * 3), "expert_weight": torch.rand(3, 2)}
    for between in ([], [nn.Identity()]):
        chain = fm.Sequential(fm.Dispatch(2), *between, grouped(), fm.Combine())
        assert not any("checked" in plan.forward_source for plan in chain.explain(torch.randn(3, 4), **named).plans)
    (plan,) = fm.Sequential(fm.Combine()).explain(torch.randn(4, 3), **ROWS).plans
    assert "checked" in plan.forward_source


# ---- compiled -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "inputs", "message"),
    [
        (grouped, {}, "the runtime input 'splits' is missing, which .*GroupedLinear takes"),
        (sequential, {"splits": torch.tensor([1, 1]), "probs": torch.ones(2)}, "no op takes the runtime input 'probs'"),
        (sequential, {"splits": [1, 1]}, "splits: expected a tensor, got list"),
    ],
)
def test_compiled_the_runtime_inputs_are_checked_as_ever(make, inputs, message):
    torch._dynamo.reset()
    compiled = torch.compile(make(), backend="eager")
    with pytest.raises(fm.InputError, match=message):
        compiled(torch.randn(2, 4), **inputs)
    compiled(torch.randn(2, 4), splits=torch.tensor([1, 1]))  # and the next call is fine


def test_compiled_as_one_graph_the_error_is_that_of_dynamo():
    torch._dynamo.reset()
    module = torch.compile(sequential(), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="the runtime input 'splits' is missing"):
        module(torch.randn(2, 4))
