"""Codes and scales, bit for bit those of torchao's: its own formulas, written by others.

torchao is asked for its rules by name, since its defaults are others.
"""

import logging
import warnings
from types import SimpleNamespace

import pytest
import torch

from fusedmoe.numerics.formats import E4M3, E5M2, ScaleRule, mxfp8, nvfp4, quantize


@pytest.fixture(scope="module")
def torchao():
    """What is used of it. At import it warns of kernels that it cannot load, and of its own use of torch."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip("torchao")
            from torchao.prototype.mx_formats import config, mx_tensor, nvfp4_tensor
    finally:
        logging.disable(level)
    return SimpleNamespace(
        to_mx=mx_tensor.to_mx,
        modes=config.ScaleCalculationMode,
        nvfp4_quantize=nvfp4_tensor.nvfp4_quantize,
        per_tensor_amax_to_scale=nvfp4_tensor.per_tensor_amax_to_scale,
    )


def wide(rows, columns, lowest, highest):
    """Blocks of 32 of any magnitude between two powers of two."""
    exponent = torch.randint(lowest, highest, (rows, columns // 32, 1))
    return (torch.randn(rows, columns // 32, 32) * torch.exp2(exponent)).view(rows, columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("rule", [ScaleRule.RCEIL, ScaleRule.FLOOR])
def test_mxfp8(rule, element, dtype, torchao):
    # above 1e-35: below, torchao 0.18 multiplies by 1 with RCEIL, where the scale's byte is 0
    x = wide(256, 1024, -110, 115).to(dtype)
    x[5] = 0
    mode = torchao.modes.RCEIL if rule is ScaleRule.RCEIL else torchao.modes.FLOOR
    scale, codes = torchao.to_mx(x, element.dtype, 32, scaling_mode=mode)
    found = quantize(x, mxfp8(element, rule=rule))
    assert torch.equal(found.scale.view(torch.uint8), scale.view(torch.uint8).view(found.scale.shape))
    assert torch.equal(found.data.view(torch.uint8), codes.view(torch.uint8))
    assert len(found.scale.view(torch.uint8).unique()) > 200


def test_nvfp4(torchao):
    """On bf16 whose blocks' scales are E4M3's normals.

    The formulas differ: torchao bounds those scales by 2**-6 from below, and divides by 6 and by the tensor's scale in
    turn, where here a product is rounded once: of fp32, a few blocks in 100 000 get another scale. It also multiplies
    elements by a factor that is rounded in another order: with a tensor scale that is a power of two it is the same.
    """
    x = torch.randn(512, 1024).view(512, 64, 16) * torch.exp2(torch.randint(-3, 4, (512, 64, 1)))
    x = x.view(512, 1024).bfloat16().clamp(-41, 41)
    x[3, 7] = 42  # 42 / 2688 = 2**-6
    amax_of_blocks = x.float().view(-1, 16).abs().amax(1)
    assert (amax_of_blocks / 6 * 64).min() >= 2.0**-6
    scale, codes = torchao.nvfp4_quantize(x, 16, torchao.per_tensor_amax_to_scale(x.abs().max()))
    found = quantize(x, nvfp4())
    assert found.tensor_scale.tolist() == [2.0**-6]
    assert torch.equal(found.scale.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(found.data, codes)
    assert len(found.scale.view(torch.uint8).unique()) > 40
