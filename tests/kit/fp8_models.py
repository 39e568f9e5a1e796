"""Tiny models of FP8 checkpoints, and transformers' FP8 products in plain PyTorch: its kernels need a GPU."""

import torch
from transformers import FineGrainedFP8Config
from transformers.integrations import finegrained_fp8

import fusedmoe as fm
from kit import moe_families

CHECKPOINT = fm.numerics.formats.fp8_block(across=128, power_of_two=False)
IN_HIGH_PRECISION = {
    "qwen3_moe": ["lm_head", "q_proj", "k_proj", "v_proj", "o_proj"],
    "deepseek_v3": ["lm_head", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}
SIZES = {"hidden_size": 192, "moe_intermediate_size": 128}  # the last block of the hidden size is not whole


def dequantized(weight, scale, dtype=torch.float32, block=(128, 128)):
    """The values of a weight with a scale per block."""
    rows, columns = weight.shape[-2:]
    scale = scale.to(dtype).repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return weight.to(dtype) * scale[..., :rows, :columns]


def in_blocks(x):
    """Rows after quantization to E4M3 with one fp32 scale for 128 features, as transformers' kernels quantize them."""
    parts = []
    for part in x.float().split(128, -1):
        scale = part.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        parts.append((part / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(parts, -1)


def plain_linear(x, weight, scale, block_size=None, bias=None, activation_scale=None, allow_deepgemm=True):
    """``finegrained_fp8.fp8_linear``, to which transformers adds a backward pass."""
    assert tuple(block_size) == (128, 128)
    assert activation_scale is None
    return torch.nn.functional.linear(in_blocks(x), dequantized(weight, scale), bias).to(x.dtype)


def fp8_model(family, dtype=torch.float32, implementation="fusedmoe", scale_fmt="float", **settings):
    """A model whose linear layers, except those of attention, and experts hold a checkpoint in FP8."""
    tiny = moe_families.tiny(family, implementation, dtype, **SIZES | settings)
    weights = {name: t.detach().clone() for name, t in tiny.model.state_dict().items()}
    config = FineGrainedFP8Config(
        weight_block_size=(128, 128), modules_to_not_convert=IN_HIGH_PRECISION[family], scale_fmt=scale_fmt
    )
    tiny.model = finegrained_fp8.replace_with_fp8_linear(
        tiny.model,
        modules_to_not_convert=IN_HIGH_PRECISION[family],
        quantization_config=config,
        pre_quantized=True,
    )
    state = {}
    wanted = tiny.model.state_dict()
    for name, t in weights.items():
        if wanted[name].dtype is torch.float8_e4m3fn:
            stack = t if t.dim() == 3 else t[None]
            format = CHECKPOINT if scale_fmt == "float" else fm.numerics.formats.fp8_block(across=128)
            q = fm.quantize(stack.float(), format)
            scale_name = f"{name}_scale_inv"
            scale = q.scale.to(wanted[scale_name].dtype)
            state |= {name: q.data.view(t.shape), scale_name: scale if t.dim() == 3 else scale[0]}
        else:
            state[name] = t
    tiny.model.load_state_dict(state, assign=True)
    tiny.experts = [(name, m) for name, m in tiny.model.named_modules() if type(m).__name__ == "FP8Experts"]
    assert len(tiny.experts) == 2
    return tiny
