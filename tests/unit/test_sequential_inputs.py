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


def moe():
    return fm.Sequential(fm.Dispatch(), *experts(dtype=torch.float32), fm.Combine())


def test_missing_names_every_op_that_takes_it():
    refused(
        "Sequential: the runtime input 'splits' is missing, which 0.GroupedLinear, 2.GroupedLinear takes",
        experts(), rows(),
    )  # fmt: skip


def test_missing_on_the_other_side_of_a_split():
    chain = fm.Sequential(fm.SwiGLU(), nn.Identity(), fm.Scale("gains"))
    refused("the runtime input 'gains' is missing, which 2.Scale takes", chain, rows())


def test_missing_in_an_op_alone():
    op = fm.GroupedLinear(E, H, I)
    refused(f"{op!r}: the runtime input 'splits' is missing, which op.GroupedLinear takes", op, torch.ones(2, H))


def test_none_is_missing():
    refused("the runtime input 'splits' is missing", experts(), rows(), splits=None)


def test_unused_lists_what_the_ops_take():
    refused(
        "no op takes the runtime input 'porbs'; the inputs that ops take: 'splits' (for 0.GroupedLinear, "
        "3.GroupedLinear), 'probs' (for 2.Scale)",
        experts(scale=True), rows(), **inputs(scale=True), porbs=torch.ones(9),
    )  # fmt: skip
    refused("no op takes the runtime input 'probs'; the inputs that ops take: none", fm.SwiGLU(), rows(),
            probs=torch.ones(9))  # fmt: skip


def test_a_derived_value_is_not_an_input():
    refused("no op takes the runtime input 'offsets'", experts(), rows(), offsets=torch.tensor([3, 3, 7]), **inputs())


def test_given_and_provided():
    refused(
        "Sequential: 'splits' is given, but 0.Dispatch provides it",
        moe(), torch.ones(4, H), **routing(), splits=torch.tensor([8, 0, 0]),
    )  # fmt: skip


def test_given_for_an_op_before_the_one_that_provides_it():
    """`probs` of the Scale is the caller's, the Combine's is the Dispatch's."""
    chain = fm.Sequential(fm.Scale("probs"), *moe())
    assert chain.runtime_inputs == ("probs", "expert_index", "expert_weight")
    assert chain(torch.ones(4, H), probs=torch.ones(4), **routing()).shape == (4, H)


def test_positional_and_duplicate_inputs_are_python_errors():
    with pytest.raises(TypeError, match="positional"):
        experts()(rows(), torch.tensor([3, 0, 4]))


@pytest.mark.parametrize("value", [[3, 0, 4], 7, "3"])
def test_wrong_type(value):
    refused(
        f"splits: expected a tensor, got {type(value).__name__}; 0.GroupedLinear, 2.GroupedLinear takes it",
        experts(), rows(), splits=value,
    )  # fmt: skip


def test_wrong_type_for_an_op_alone():
    op = fm.Scale("probs")
    refused("Scale('probs'): probs: expected a tensor, got list", op, torch.ones(2, H), probs=[1.0, 1.0])


def test_rows_of_the_wrong_type():
    refused("Sequential: x: expected a tensor, got list", experts(), [[1.0]], **inputs())
    refused("x: expected a tensor, got list", fm.SwiGLU(), [[1.0]])


SPARSE_OR_NESTED = {
    "expected a dense tensor, got layout torch.sparse_coo; call .to_dense()": torch.Tensor.to_sparse,
    "expected a dense tensor, got layout torch.sparse_csr; call .to_dense()": torch.Tensor.to_sparse_csr,
    "expected a dense tensor, got a nested tensor; concatenate": lambda x: torch.nested.nested_tensor([x, x]),
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


def test_rows_without_dimensions():
    refused("0.GroupedLinear: x: expected rows, got a scalar", experts(), torch.tensor(1.0), **inputs())


@pytest.mark.parametrize(
    ("splits", "text"),
    [
        (torch.tensor([3, 4]), "expected shape (3,), one count per expert, got (2,)"),
        (torch.tensor([[3, 0, 4]]), "expected shape (experts,), got (1, 3)"),
        (torch.tensor(7), "expected shape (experts,), got ()"),
        (torch.tensor([3.0, 0, 4]), "expected integers, rows per expert, got torch.float32"),
        (torch.tensor([True, True, True]), "expected integers, rows per expert, got torch.bool"),
    ],
    ids=["shape", "dims", "scalar", "float", "bool"],
)
def test_wrong_splits(splits, text):
    with pytest.raises(InputError, match=re.escape(text)) as error:
        experts()(rows(), splits=splits)
    assert str(error.value).startswith("0.GroupedLinear: ")
    assert "splits: expected" in str(error.value)


def test_wrong_shape_and_dtype_of_a_scale():
    chain, x = experts(scale=True), rows()
    for probs, text in [
        (torch.ones(8), "2.Scale: Scale('probs'): probs: expected shape (9,), one value per row, got (8,)"),
        (torch.ones(9, 1), "2.Scale: Scale('probs'): probs: expected shape (9,), one value per row, got (9, 1)"),
        (torch.ones(9, dtype=torch.int64), "2.Scale: Scale('probs'): probs: expected a floating-point dtype"),
    ]:
        refused(text, chain, x, **inputs(), probs=probs)


def test_a_shape_that_stops_fitting_is_refused_after_calls_that_fitted():
    chain = experts(scale=True)
    chain(rows(), **inputs(scale=True))
    refused("probs: expected shape (9,)", chain, rows(), **inputs(), probs=torch.ones(8, dtype=torch.float64))


def test_wrong_features():
    refused(
        "0.GroupedLinear: GroupedLinear(num_groups=3, in_features=8, out_features=8): x: expected shape (rows, 8), "
        "got (9, 7)",
        experts(), torch.ones(9, 7, dtype=torch.float64), **inputs(),
    )  # fmt: skip


def test_wrong_device_names_the_ops():
    refused(
        "splits: expected on cpu, where the rows are, got on meta; 0.GroupedLinear, 2.GroupedLinear takes it",
        experts(), rows(), splits=torch.tensor([3, 0, 4], device="meta"),
    )  # fmt: skip
    refused("probs: expected on cpu, where the rows are, got on meta; 2.Scale takes it", experts(scale=True), rows(),
            **inputs(), probs=torch.ones(9, device="meta"))  # fmt: skip


def test_counts_below_zero():
    refused("splits: expected counts of at least 0, got -1 for expert 1", experts(), rows(),
            splits=torch.tensor([3, -1, 4]))  # fmt: skip


def test_counts_above_the_rows():
    chain = experts()
    refused("splits: expected a sum of at most 9, the number of rows, got 10", chain, rows(),
            splits=torch.tensor([3, 3, 4]))  # fmt: skip
    assert chain(rows(), splits=torch.tensor([3, 2, 4])).shape == (9, H)


@pytest.mark.parametrize("ends", [(), ("module",)], ids=["one chain", "across a split"])
def test_probs_must_not_be_applied_twice(ends):
    middle = [nn.Identity() for _ in ends]
    chain = fm.Sequential(fm.Dispatch(), *experts(scale=True, dtype=torch.float32), *middle, fm.Combine())
    last = 5 + len(middle)
    refused(
        f"'probs' would be applied twice, by 3.Scale and by {last}.Combine; apply it in one of the two only",
        chain, torch.ones(4, H), **routing(),
    )  # fmt: skip


def test_scaling_by_two_different_inputs_is_fine():
    chain = fm.Sequential(fm.Scale("a"), fm.SwiGLU(), fm.Scale("b"))
    assert chain(torch.ones(4, H), a=torch.ones(4), b=torch.ones(4)).shape == (4, I)


def test_explain_refuses_the_same():
    with pytest.raises(InputError, match="'splits' is missing"):
        experts().explain(rows())
    with pytest.raises(InputError, match=re.escape("x: expected shape (rows, 8)")):
        experts().explain(torch.ones(9, 7, dtype=torch.float64), **inputs())


def test_an_error_leaves_the_chain_usable():
    chain = experts()
    with pytest.raises(InputError):
        chain(rows(), splits=torch.tensor([30, 0, 0]))
    assert chain(rows(), **inputs()).shape == (9, H)


def test_dispatch_without_a_grouped_op_after_it():
    refused("Dispatch(): num_experts is None, and no grouped op follows", fm.Sequential(fm.Dispatch()),
            torch.ones(4, H), **routing())  # fmt: skip
