"""For tests on a CPU: a machine with an sm_100 GPU, its kernels that quantize, and layers of a size that fits."""

import pytest
import torch

from fusedmoe.kernels.build import toolkit
from fusedmoe.kernels.sm100 import package, quantize_functions
from fusedmoe.numerics.formats import Quantizer, mxfp8, nvfp4
from fusedmoe.numerics.formats.groups import padded_rows
from fusedmoe.numerics.formats.packed import Packed, padded_layout, quantize_packed
from kit import sm90_machine, sm90_stand_ins

BF16 = torch.bfloat16
E, H, I = 4, 256, 128  # noqa: E741  (experts, hidden, intermediate)
SPLITS = (300, 0, 257, 1)  # uneven, without rows, one more than a block, with one row
ROWS = 600  # 42 of them belong to no expert

PREFIX = "sm100."
QUANTIZE, QUANTIZE_GRAD, QUANTIZE_WEIGHT = "sm100.quantize", "sm100.quantize_grad", "sm100.quantize_weight"
GEMM, GEMM_ACTIVATION = "sm100.grouped_gemm", "sm100.grouped_gemm_activation_quantize"
DGRAD, DGRAD_ACTIVATION = "sm100.grouped_dgrad", "sm100.grouped_dgrad_activation_quantize"
WGRAD = "sm100.grouped_wgrad"
ACTIVATION, DACTIVATION = "sm100.activation", "sm100.dactivation"
GEMM_COMBINE, DGRAD_DDISPATCH = "sm100.grouped_gemm_combine", "sm100.grouped_dgrad_ddispatch"
GATHERED_QUANTIZE, GATHERED_QUANTIZE_GRAD = "sm100.gathered_quantize", "sm100.gathered_quantize_grad"

# the rules of `fusedmoe.builtin_rules.ROWS`
MOVING = {
    f"{PREFIX}{name}"
    for name in (
        "dispatch", "combine", "dcombine", "combine_weight_grad", "ddispatch", "dispatch_weight_grad", "column_sums",
        "linear_column_sums", "offsets_from_splits",
    )
}  # fmt: skip
QUANTIZE_FUNCTIONS = {  # which need a GPU
    name: getattr(quantize_functions, name)
    for name in ("bind_quantize_packed", "bind_quantize_packed_weight", "bind_quantize_packed_nvfp4")
}


@pytest.fixture
def blackwell_machine(monkeypatch):
    """The CPU says that it is an sm_100 GPU, on which the kernels were verified."""
    monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: 100)
    monkeypatch.setattr(toolkit, "why_unusable", lambda: None)
    monkeypatch.setattr(package, "why_missing", lambda: None)
    monkeypatch.setattr(package, "why_unverified", lambda: None)
    sm90_stand_ins.install(monkeypatch.setattr)  # of the kernels that sort, move and sum rows
    for name in QUANTIZE_FUNCTIONS:
        monkeypatch.setattr(quantize_functions, name, globals()[name])


def bind_quantize_packed(x, offsets, index=None, *, rows=True, columns=False, halves=False):
    """Stand for the kernel: as it does, write nothing after the last expert's rows (NaN shows that)."""
    axes = [axis for axis, wanted in ((-1, rows), (-2, columns)) if wanted]

    def run(x, offsets, index=None):
        if index is not None:
            x = x[index.long().clamp(max=len(x) - 1)]
        end, across = int(padded_layout(offsets, len(x)).ends_E[-1]), -(-x.shape[1] // 128)
        forms = [quantize_packed(x, Quantizer(mxfp8()), Packed(axis, halves), offsets) for axis in axes]
        for form in forms:
            form.data.view(torch.uint8)[end:] = 0x7F
            form.scale.view(torch.uint8)[end // 128 * across * 512 :] = 0xFF
        return tuple(form.tensors() for form in forms)

    return run


def bind_quantize_packed_nvfp4(
    x, offsets, index=None, *, rows=True, columns=False, halves=False, rotated=False, stochastic=False, packed=False
):
    """Stand for the kernel of rows in NVFP4, in the same way. It draws random bits of its own."""
    axes = [axis for axis, wanted in ((-1, rows), (-2, columns)) if wanted]
    quantizer = Quantizer(nvfp4(), hadamard=rotated, stochastic_rounding=stochastic)
    lines, places = len(x if index is None else index), len(x)
    if not packed:
        places = padded_rows(lines, len(offsets), 256)
    drawn = {-1: (places, x.shape[1]), -2: (x.shape[1], places)}

    def run(x, offsets, factors, random=(), index=None):
        assert not packed or not (offsets % 256).any()
        if index is not None:
            x = x[index.long().clamp(max=len(x) - 1)]
        if packed:  # in place of rows that the kernel does not read
            x = x.clone()
            x[int(offsets[-1]) :] = torch.nan
        assert [t.shape for t in random] == [drawn[axis] for axis in axes] * stochastic
        forms = [quantize_packed(x, quantizer, Packed(axis, halves), offsets) for axis in axes]
        found = []
        for axis, form, factor in zip(axes, forms, factors, strict=True):
            assert torch.equal(1 / factor, form.tensor_scale)
            end = int(offsets[-1] if packed else padded_layout(offsets, len(x)).ends_E[-1])
            # rows that are packed already are packed once more, after the last expert's
            codes = form.data[:places] if axis == -1 else form.data[:, : places // 2].contiguous()
            scale = form.scale[: places * x.shape[1] // 16]
            (codes[end:] if axis == -1 else codes[:, end // 2 :]).fill_(0x7F)
            scale.view(torch.uint8)[end * x.shape[1] // 16 :] = 0xFF
            found.append((codes, scale))
        return tuple(found)

    return run


def bind_quantize_packed_weight(weight, *, rows=True, columns=False, halves=False):
    """Stand for the kernel of weights."""
    axes = [axis for axis, wanted in ((-1, rows), (-2, columns)) if wanted]

    def run(weight):
        return tuple(quantize_packed(weight, Quantizer(mxfp8()), Packed(axis, halves)).tensors() for axis in axes)

    return run


def experts(act=None, *, bias=False, hidden=H, width=I, **how):
    """GroupedLinear, an activation, a Scale where wanted, GroupedLinear. ``bias``: "trained", "frozen" or False."""
    chain = sm90_machine.experts(act, bias=bool(bias), hidden=hidden, width=width, **how)
    with torch.no_grad():
        chain[0].weight.mul_(4)  # activations are far from linear
        for layer in (chain[0], chain[-1]) if bias else ():
            layer.bias.normal_()
            layer.bias.requires_grad_(bias == "trained")
    return chain


def tokens(count=ROWS, splits=SPLITS, *, hidden=H, dtype=BF16, requires_grad=True):
    """Rows sorted by expert, and NaN in those of no expert."""
    x = torch.randn(count, hidden, dtype=dtype)
    x[sum(splits) :] = torch.nan
    return x.requires_grad_(requires_grad)


def inputs(count=ROWS, splits=SPLITS, *, scale=False, requires_grad=True):
    named = {"splits": torch.tensor(splits)}
    if scale:
        probs = torch.rand(count) + 0.1
        probs[sum(splits) :] = torch.nan
        named["probs"] = probs.requires_grad_(requires_grad)
    return named
