"""torch's default device and default dtype are those of new parameters, and change no call."""

import ast
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from kit.compare import assert_bitwise

import fusedmoe as fm
from fusedmoe.numerics.formats import Delayed, fp8_block
from fusedmoe.numerics.recipes import FP8Tensor

HERE = {"device": "cpu", "dtype": torch.bfloat16}  # sizes for the blocks of all recipes
E, H, I, TOKENS = 4, 128, 128, 8  # noqa: E741


@contextmanager
def default_device():
    with torch.device("meta"):
        yield


@contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def moe(**settings):
    return fm.MoE(H, I, E, 2, **(HERE | settings))


def stored():
    weight = torch.randn(E, H, I, device="cpu", dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    q = fm.quantize(weight, fp8_block(across=128, power_of_two=False))
    return fm.Sequential(fm.GroupedLinear.from_quantized(q.data, q.scale))


LAYERS = {
    "moe": lambda: moe(shared_intermediate=I, shared_gate=True),
    "moe in fp32": lambda: moe(dtype=torch.float32),
    "moe in fp64": lambda: moe(dtype=torch.float64),
    "moe with groups": lambda: moe(score="sigmoid", num_groups=2, top_groups=1, scale=2.0, router_bias=True, bias=True),
    "experts": lambda: fm.Sequential(
        fm.GroupedLinear(E, H, 2 * I, bias=True, **HERE),
        fm.SwiGLU(limit=1.0),
        fm.Scale("probs"),
        fm.GroupedLinear(E, I, H, **HERE),
    ),
    "dense": lambda: fm.Sequential(fm.Linear(H, I, **HERE), fm.SquaredReLU(), fm.Linear(I, H, **HERE)),
    "lora": lambda: fm.Sequential(fm.GroupedLoRA(fm.GroupedLinear(E, H, I, **HERE), rank=8)),
    "stored": stored,
}
CASES = [(name, "bf16") for name in LAYERS] + [
    ("moe", "fp8_block"),
    ("experts", FP8Tensor(delayed=Delayed(history=2))),
    ("experts", "fp8_row"),
    ("experts", "mxfp8"),
    ("dense", "nvfp4"),  # with a Hadamard transform
]


def results(layer, recipe):
    """Two calls of a layer, forward and backward: the outputs and the gradients."""
    seeded = torch.Generator().manual_seed(1)
    dtype = next((p.dtype for p in layer.parameters() if p.requires_grad), torch.bfloat16)
    found = []
    for _ in range(2):
        x = torch.randn(TOKENS, H, generator=seeded, device="cpu", dtype=torch.float32).to(dtype).requires_grad_()
        inputs = {}
        if not isinstance(layer, fm.MoE):
            given = {
                "splits": torch.tensor([3, 0, 4, 1], device="cpu"),
                "probs": torch.rand(TOKENS, generator=seeded, device="cpu", dtype=torch.float32),
            }
            inputs = {name: given[name] for name in layer.runtime_inputs}
        with fm.recipe(recipe):
            y = layer(x, **inputs)
        y.sum().backward()
        found += [y.detach(), x.grad, *[p.grad for p in layer.parameters() if p.grad is not None]]
        layer.zero_grad()
    return found


@pytest.mark.parametrize("default", [default_device, default_dtype])
@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_a_call_does_not_depend_on_the_defaults_of_torch(name, recipe, default):
    torch.manual_seed(0)
    with default():
        got = results(LAYERS[name](), recipe)
    torch.manual_seed(0)
    want = results(LAYERS[name](), recipe)
    assert len(want) >= 4
    assert_bitwise(got, want, zeros=True)
    assert {t.device for t in got} == {t.device for t in want}


def test_the_defaults_of_torch_are_those_of_new_parameters():
    with default_device(), default_dtype():
        layer = fm.MoE(16, 8, 4, 2)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float64)}


# the functions of torch that make tensors on the default device, and those of them that take the default dtype
_ON_DEFAULT_DEVICE = {
    "arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace",
    "normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "sparse_coo_tensor", "tensor",
    "tril_indices", "triu_indices", "zeros",
}  # fmt: skip
_IN_DEFAULT_DTYPE = {
    "empty", "empty_permuted", "empty_strided", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros"
}  # fmt: skip


def test_every_new_tensor_has_a_device_and_a_dtype():
    """The package names both, with keywords: otherwise a user's defaults would decide."""
    missing = []
    any_call = re.compile(rf"torch\.({'|'.join(_ON_DEFAULT_DEVICE)})\(")
    texts = {path: path.read_text(encoding="utf-8") for path in Path(fm.__file__).parent.rglob("*.py")}
    for path, text in texts.items():
        for call in ast.walk(ast.parse(text)) if any_call.search(text) else ():
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            name, given = call.func.attr, {keyword.arg for keyword in call.keywords}
            if name not in _ON_DEFAULT_DEVICE or ast.unparse(call.func.value) != "torch" or None in given:
                continue  # None: **keywords
            required = {"device", "dtype"} if name in _IN_DEFAULT_DTYPE else {"device"}
            if required - given:
                missing.append(f"{path.name}:{call.lineno}: {ast.unparse(call)}")
    assert not missing
