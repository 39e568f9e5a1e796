"""Runtime inputs: each given once, by name. What is wrong is refused with the ops that wanted it and what came."""

import re

import pytest
import torch
from kit.toy import E, H, I, experts, inputs, rows
from torch import nn

import fusedmoe as fm
from fusedmoe import InputError


def refused(text, chain, *args, **named):
    with pytest.raises(InputError, match=re.escape(text)):
        chain(*args, **named)


def routing(tokens=4):
    return {"expert_index": torch.zeros(tokens, 2, dtype=torch.int64), "expert_weight": torch.ones(tokens, 2)}


PROBS = torch.ones(9, dtype=torch.float64)
REFUSED = {
    "missing": (experts, {}, "Sequential: the runtime input 'splits' is missing, which 0.GroupedLinear, 2.Gr"),
    "missing after a split": (
        lambda: fm.Sequential(fm.SwiGLU(), nn.Identity(), fm.Scale("gains")), {}, "'gains' is missing, which 2.Scale"
    ),
    "missing for an op alone": (lambda: experts()[0], {}, "'splits' is missing, which op.GroupedLinear takes"),
    "None": (experts, {"splits": None}, "the runtime input 'splits' is missing"),
    "unused": (
        lambda: experts(scale=True), {**inputs(scale=True), "porbs": PROBS},
        "no op takes the runtime input 'porbs'; the inputs that ops take: 'splits' (for 0.GroupedLinear, "
        "3.GroupedLinear), 'probs' (for 2.Scale)",
    ),
    "derived": (
        experts, {**inputs(), "offsets": torch.tensor([3, 3, 7])}, "no op takes the runtime input 'offsets'"
    ),
    "provided": (
        lambda: fm.Sequential(fm.Dispatch(), *experts(), fm.Combine()), {**routing(9), **inputs()},
        "Sequential: 'splits' is given, but 0.Dispatch provides it",
    ),
    **{
        f"type of {value}": (
            experts, {"splits": value},
            f"splits: expected a tensor, got {type(value).__name__}; 0.GroupedLinear, 2.GroupedLinear takes it",
        )
        for value in ([3, 0, 4], "3")
    },
    **{
        f"splits {i}": (experts, {"splits": splits}, f"splits: {text}")
        for i, (splits, text) in enumerate([
            (torch.tensor([3, 4]), "expected shape (3,), one count per expert, got (2,)"),
            (torch.tensor(7), "expected shape (experts,), got ()"),
            (torch.tensor([3.0, 0, 4]), "expected integers, rows per expert, got torch.float32"),
            (torch.tensor([3, -1, 4]), "expected counts of at least 0, got -1 for expert 1"),
            (torch.tensor([3, 3, 4]), "expected a sum of at most 9, the number of rows, got 10"),
            (
                torch.tensor([3, 0, 4], device="meta"),
                "expected on cpu, where the rows are, got on meta; 0.GroupedLinear, 2.GroupedLinear takes it",
            ),
        ])
    },
    **{
        f"probs {i}": (
            lambda: experts(scale=True), {**inputs(), "probs": probs},
            f"2.Scale: Scale('probs'): probs: expected {text}",
        )
        for i, (probs, text) in enumerate([
            (torch.ones(8), "shape (9,), one value per row, got (8,)"),
            (torch.ones(9, dtype=torch.int64), "a floating-point dtype"),
        ])
    },
}  # fmt: skip


@pytest.mark.parametrize(("make", "named", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_inputs(make, named, text):
    chain, x = make(), rows()
    if "splits" in chain.runtime_inputs:
        chain(x, **{name: t for name, t in inputs(scale=True).items() if name in chain.runtime_inputs})
    refused(text, chain, x, **named)  # after a call that fitted, too
    if isinstance(chain, fm.Sequential) and "missing" in text:
        with pytest.raises(InputError, match="is missing"):
            chain.explain(x, **named)


def test_wrong_rows():
    refused("Sequential: x: expected a tensor, got list", experts(), [[1.0]], **inputs())
    refused("x: expected a tensor, got list", fm.SwiGLU(), [[1.0]])
    refused("0.GroupedLinear: x: expected rows, got a scalar", experts(), torch.tensor(1.0), **inputs())
    named = "0.GroupedLinear: GroupedLinear(num_groups=3, in_features=8, out_features=8)"
    for call in (experts(), experts().explain):
        refused(f"{named}: x: expected shape (rows, 8), got (9, 7)", call, torch.ones(9, 7).double(), **inputs())
    alone = fm.Sequential(fm.Dispatch())
    refused("Dispatch(): num_experts is None, and no grouped op follows", alone, rows(), **routing(9))
    with pytest.raises(TypeError, match="positional"):
        experts()(rows(), torch.tensor([3, 0, 4]))


SPARSE_OR_NESTED = {
    "expected a dense tensor, got layout torch.sparse_coo; call .to_dense()": torch.Tensor.to_sparse,
    "expected a dense tensor, got a nested tensor; ": lambda x: torch.nested.nested_tensor(
        [x, x[:3]], layout=torch.jagged
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("message", SPARSE_OR_NESTED)
def test_sparse_and_nested_tensors(message):
    x, moe = rows(), fm.MoE(H, I, E, 2, dtype=torch.float64)
    other = SPARSE_OR_NESTED[message](x)
    with pytest.raises(fm.InputError, match=rf"0\.GroupedLinear: x: {re.escape(message)}"):
        experts()(other, **inputs())
    for call in (moe, moe.explain):
        with pytest.raises(fm.InputError, match=f"MoE: x: {re.escape(message)}"):
            call(other)
    with pytest.raises(fm.InputError, match=rf"op\.SwiGLU: x: {re.escape(message)}"):
        fm.SwiGLU()(other)
    with pytest.raises(fm.InputError, match="splits: expected a dense tensor, got "):
        experts()(x, splits=torch.tensor([4, 5]).to_sparse())


@pytest.mark.parametrize("ends", [(), ("module",)], ids=["one chain", "across a split"])
def test_probs_must_not_be_applied_twice(ends):
    middle = [nn.Identity() for _ in ends]
    chain = fm.Sequential(fm.Dispatch(), *experts(scale=True, dtype=torch.float32), *middle, fm.Combine())
    last = 5 + len(middle)
    refused(
        f"'probs' would be applied twice, by 3.Scale and by {last}.Combine; apply it in one of the two only",
        chain, torch.ones(4, H), **routing(),
    )  # fmt: skip
