"""The FP8 block recipe of Transformer Engine: its names and fields."""

from dataclasses import dataclass
from enum import Enum


class Format(Enum):
    E4M3 = "e4m3"


@dataclass(frozen=True)
class QParams:
    power_2_scale: bool = True
    amax_epsilon: float = 0.0


@dataclass
class Float8BlockScaling:
    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp = QParams()
    fp8_quant_fwd_weight = QParams()
    fp8_quant_bwd_grad = QParams()
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_dpa: bool = False
    backward_override: object = None
