"""Quantized values in a plan: the tensors of each form have the shapes and dtypes that their spec announces."""

import copy

import pytest
import torch

import fusedmoe as fm
from fusedmoe.numerics.formats import QuantizedSpec
from fusedmoe.numerics.formats.roles import ROLES

QUANTIZERS = {f"{name}.{role}": q for name, roles in ROLES.items() for role, q in roles._asdict().items()}
SPLITS = {"even": [32, 32], "ragged": [5, 0, 40], "tail": [3, 9], "no rows": [0, 0]}


def assert_announced(q, spec, offsets=None):
    assert [(tuple(t.shape), t.dtype) for t in q.tensors()] == [*spec.tensors()]
    assert spec.nbytes == q.nbytes
    again = spec.tensor(q.tensors(), offsets)
    assert torch.equal(again.dequantize(), q.dequantize())


@pytest.mark.parametrize("axis", [-1, -2], ids=["by rows", "by columns"])
@pytest.mark.parametrize("features", [64, 72])
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("name", [name for name in QUANTIZERS if not name.endswith("weight")])
def test_sorted_rows(name, splits, features, axis):
    quantizer, counts = QUANTIZERS[name], torch.tensor(SPLITS[splits])
    offsets = counts.cumsum(0, dtype=torch.int32)
    rows = torch.randn(int(counts.sum()) + (7 if splits == "tail" else 0), features, dtype=torch.bfloat16)
    q = fm.quantize(rows, quantizer, axis, offsets=offsets)
    rotated = quantizer.hadamard and axis == -2
    spec = QuantizedSpec(tuple(rows.shape), rows.dtype, quantizer.format, axis, len(counts), rotated=rotated)
    assert_announced(q, spec, offsets)


@pytest.mark.parametrize("axis", [-1, -2], ids=["by rows", "by columns"])
@pytest.mark.parametrize("shape", [(48, 64), (33, 72)])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_one_matrix(name, shape, axis):
    quantizer = QUANTIZERS[name]
    q = fm.quantize(torch.randn(shape), quantizer, axis)
    rotated = quantizer.hadamard and axis == -2
    assert_announced(q, QuantizedSpec(shape, torch.float32, quantizer.format, axis, rotated=rotated))


@pytest.mark.parametrize("axis", [-1, -2], ids=["by rows", "by columns"])
@pytest.mark.parametrize("shape", [(3, 48, 64), (2, 33, 72)])
@pytest.mark.parametrize("name", [name for name in QUANTIZERS if name.endswith("weight")])
def test_a_matrix_per_expert(name, shape, axis):
    quantizer = QUANTIZERS[name]
    q = fm.quantize(torch.randn(shape), quantizer, axis)
    assert_announced(q, QuantizedSpec(shape, torch.float32, quantizer.format, axis, stacked=True))


@pytest.mark.parametrize("recipe", ROLES)
def test_autograd_saves_tensors_alone(recipe):
    """Codes and scales, by columns for the weight gradients; the offsets once."""
    experts = fm.Sequential(fm.GroupedLinear(3, 64, 64), fm.SwiGLU(), fm.GroupedLinear(3, 32, 64))
    x, splits = torch.randn(90, 64, requires_grad=True), torch.tensor([40, 0, 45])
    with fm.recipe(recipe):
        y = experts(x, splits=splits)
        (plan,) = experts.explain(x, splits=splits).plans
    saved = y.grad_fn.saved_tensors
    assert {"0.input:columns", "2.input:columns", "offsets"} <= {*plan.kept}
    assert all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in saved)
    assert len({(t.data_ptr(), t.shape) for t in saved}) == len(saved)
    assert sum(t.nbytes for t in saved) == plan.kept_bytes + sum(
        t.nbytes for t, name in zip(saved, y.grad_fn.call.plan.saved_tensors, strict=True) if "weight" in name
    )


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_copied_quantizer_gives_the_same_codes(name):
    """A deep copy of a module copies the formats of its ops."""
    quantizer = QUANTIZERS[name]
    x, random_bits = torch.randn(48, 64), torch.randint(0, 256, (48, 64), dtype=torch.uint8)
    options = {"random_bits": random_bits} if quantizer.stochastic_rounding else {}
    found = [fm.quantize(x, q, **options) for q in (quantizer, copy.deepcopy(quantizer))]
    for a, b in zip(*[q.tensors() for q in found], strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert torch.equal(*[q.dequantize() for q in found])
