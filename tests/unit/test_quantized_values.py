"""Quantized values in a plan: the tensors of each form have the shapes and dtypes that their spec announces."""

import pytest
import torch
from kit.splits import ends

import fusedmoe as fm
from fusedmoe.numerics.formats import QuantizedSpec
from fusedmoe.numerics.formats.roles import ROLES

QUANTIZERS = {f"{name}.{role}": q for name, roles in ROLES.items() for role, q in roles._asdict().items()}
COUNTS = [([32, 32], 0, 64), ([5, 0, 40], 0, 72), ([3, 9], 7, 72), ([0, 0], 0, 64)]  # rows after those, features
ROWS = [
    (name, counts, (sum(counts) + tail, features))
    for name in QUANTIZERS
    if not name.endswith("weight")
    for counts, tail, features in COUNTS
]
MATRICES = [(name, None, shape) for name in QUANTIZERS for shape in ((48, 64), (33, 72))]
STACKS = [(name, None, shape) for name in QUANTIZERS if name.endswith("weight") for shape in ((3, 48, 64), (2, 33, 72))]


def assert_announced(q, spec, offsets=None):
    assert [(tuple(t.shape), t.dtype) for t in q.tensors()] == [*spec.tensors()]
    assert spec.nbytes == q.nbytes
    again = spec.tensor(q.tensors(), offsets)
    assert torch.equal(again.dequantize(), q.dequantize())


@pytest.mark.parametrize("axis", [-1, -2], ids=["by rows", "by columns"])
@pytest.mark.parametrize(("name", "counts", "shape"), ROWS + MATRICES + STACKS)
def test_announced_shapes_and_dtypes(name, counts, shape, axis):
    """Of rows sorted by expert, some with rows of no expert after them, of one matrix, and of a matrix per expert."""
    quantizer, values = QUANTIZERS[name], torch.randn(shape, dtype=torch.bfloat16)
    offsets = None if counts is None else ends(*counts)
    q = fm.quantize(values, quantizer, axis, offsets=offsets)
    rotated = quantizer.hadamard and axis == -2
    experts = None if counts is None else len(counts)
    settings = {"stacked": True} if len(shape) == 3 else {"rotated": rotated}
    spec = QuantizedSpec(shape, values.dtype, quantizer.format, axis, experts, **settings)
    assert_announced(q, spec, offsets)


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
