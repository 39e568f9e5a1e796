"""The ops: small modules, each defined by a few lines of plain PyTorch. One file per family."""

from fusedmoe.ops.dispatch import Combine, CombineWeightGrad, DCombine, DDispatch, Dispatch, DispatchWeightGrad
from fusedmoe.ops.glu import DGLU, GLU, DGeGLU, DReGLU, DSquaredReLU, DSwiGLU, GeGLU, ReGLU, SquaredReLU, SwiGLU
from fusedmoe.ops.grouped_linear import (
    BiasGrad,
    Dgrad,
    GroupedLinear,
    Linear,
    LinearBiasGrad,
    LinearDgrad,
    LinearWgrad,
    LinearWgradIntoMainGrad,
    Wgrad,
    WgradIntoMainGrad,
)
from fusedmoe.ops.grouped_lora import LoRADown, LoRADownDgrad, LoRADownWgrad, LoRAUp, LoRAUpDgrad, LoRAUpWgrad
from fusedmoe.ops.op import AutogradBackward, BackwardOp, Op, SpecLike, TensorSpec
from fusedmoe.ops.quantize import Quantize, QuantizeColumns, QuantizeGrad
from fusedmoe.ops.router import DRouter, Router, RouterBiasGrad, RouterLogitsGrad, RouterWeightGrad
from fusedmoe.ops.scale import DScale, Scale, ScaleGrad
from fusedmoe.ops.state.weight_cache import clear_weight_cache, weight_cache_bytes

__all__ = [
    "DGLU",
    "GLU",
    "AutogradBackward",
    "BackwardOp",
    "BiasGrad",
    "Combine",
    "CombineWeightGrad",
    "DCombine",
    "DDispatch",
    "DGeGLU",
    "DReGLU",
    "DRouter",
    "DScale",
    "DSquaredReLU",
    "DSwiGLU",
    "Dgrad",
    "Dispatch",
    "DispatchWeightGrad",
    "GeGLU",
    "GroupedLinear",
    "Linear",
    "LinearBiasGrad",
    "LinearDgrad",
    "LinearWgrad",
    "LinearWgradIntoMainGrad",
    "LoRADown",
    "LoRADownDgrad",
    "LoRADownWgrad",
    "LoRAUp",
    "LoRAUpDgrad",
    "LoRAUpWgrad",
    "Op",
    "Quantize",
    "QuantizeColumns",
    "QuantizeGrad",
    "ReGLU",
    "Router",
    "RouterBiasGrad",
    "RouterLogitsGrad",
    "RouterWeightGrad",
    "Scale",
    "ScaleGrad",
    "SpecLike",
    "SquaredReLU",
    "SwiGLU",
    "TensorSpec",
    "Wgrad",
    "WgradIntoMainGrad",
    "clear_weight_cache",
    "weight_cache_bytes",
]
