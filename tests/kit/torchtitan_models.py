"""torchtitan's modules, `exact_expert` for both classes of experts, and values for their parameters."""

import importlib.util
import sys
from unittest.mock import MagicMock

import pytest
import torch

from kit.oracles import glu

LIMIT = 0.5  # of GPT-OSS's activation: low enough that many values are beyond it
KINDS = ["GroupedExperts", "GptOssGroupedExperts"]


def imported(module):
    """A module of torchtitan's; without its kernels in Triton, which no test here runs, where there is no Triton."""
    pytest.importorskip("torchtitan")
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("triton") is None:
            patch.setitem(sys.modules, "torchtitan.distributed.minimal_async_ep.kernels", MagicMock())
        return pytest.importorskip(module, exc_type=ImportError)  # parts of it want a newer torch than 2.11


def exact_expert(parameters):
    """`expert(e, rows)` of torchtitan's formulas, from all parameters by name."""
    p = parameters

    def plain(e, r):
        both = torch.cat([r @ p["w1_EFD"][e].T, r @ p["w3_EFD"][e].T], dim=1)
        return glu(both, "swiglu") @ p["w2_EDF"][e].T

    def gpt_oss(e, r):
        both = r @ p["mlp1_weight_EGD"][e].T + p["mlp1_bias_EG"][e]
        hidden = glu(both, "swiglu", LIMIT, 1.702, 1.0, interleaved=True)
        return hidden @ p["mlp2_weight_EDF"][e].T + p["mlp2_bias_ED"][e]

    return plain if "w1_EFD" in p else gpt_oss


def filled(module, dtype=torch.float32):
    """The module with values that bf16 holds exactly, so that an exact result is of the very same numbers."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            parameter.copy_((0.3 * torch.randn(parameter.shape, generator=generator)).bfloat16())
    return module.to(dtype)
