"""`transformer_engine.pytorch.ops` as its documentation of 2.20 has it: names, signatures, attributes, parameters, and
extra inputs by position. What it computes is written from the documented formulas, in fp64, one expert at a time.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


class BasicOperation(nn.Module):
    num_extra_inputs = 0


class GroupedLinear(BasicOperation):
    num_extra_inputs = 1

    def __init__(
        self, num_groups, in_features, out_features, *, bias=True, device=None, dtype=None,
        accumulate_into_main_grad=False, single_grouped_weight=False, single_grouped_bias=False,
        delay_wgrad_compute=False, scale_bias=False,
    ):  # fmt: skip
        super().__init__()
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.single_grouped_weight, self.single_grouped_bias = single_grouped_weight, single_grouped_bias
        self.use_bias, self._scale_bias = bias, scale_bias and bias
        self._accumulate_into_main_grad, self._with_quantized_weight = accumulate_into_main_grad, False
        self.wgrad_store = SimpleNamespace(delay_wgrad_compute=lambda: delay_wgrad_compute)
        shapes = {"weight": (out_features, in_features)} | ({"bias": (out_features,)} if bias else {})
        for name, shape in shapes.items():
            together = single_grouped_weight if name == "weight" else single_grouped_bias
            if together:
                values = torch.randn(num_groups, *shape, device=device, dtype=dtype)
                self.register_parameter(name, nn.Parameter(0.3 * values))
            for i in range(num_groups):
                values = None if together else 0.3 * torch.randn(shape, device=device, dtype=dtype)
                self.register_parameter(f"{name}{i}", None if together else nn.Parameter(values))

    def of(self, name, expert):
        whole = self._parameters.get(name)
        return self._parameters.get(f"{name}{expert}") if whole is None else whole[expert]

    def forward(self, x, splits):
        parts = []
        for e, rows in enumerate(x.split(splits.tolist())):
            bias = self.of("bias", e)
            parts.append(F.linear(rows, self.of("weight", e).double(), None if bias is None else bias.double()))
        return torch.cat(parts)


class _GLU(BasicOperation):
    """``f(a) * b`` of the first and the second half; `f` and what is done to b are the subclass's."""

    def __init__(self, *, cache_quantized_input=False, glu_interleave_size=None):
        super().__init__()
        self.cache_quantized_input, self.glu_interleave_size = cache_quantized_input, glu_interleave_size

    def halves(self, x):
        size = self.glu_interleave_size
        if size is None:
            return x.chunk(2, dim=-1)
        blocks = x.split(size, dim=-1)
        return torch.cat(blocks[::2], dim=-1), torch.cat(blocks[1::2], dim=-1)

    def forward(self, x):
        a, b = self.halves(x)
        return self.f(a) * b


class SwiGLU(_GLU):
    def f(self, a):
        return a * torch.sigmoid(a)


class ClampedSwiGLU(_GLU):
    def __init__(self, *, limit=7.0, alpha=1.702, glu_linear_offset=1.0, **options):
        super().__init__(**options)
        self.limit, self.alpha, self.glu_linear_offset = limit, alpha, glu_linear_offset

    def forward(self, x):
        a, b = self.halves(x)
        a, b = torch.clamp(a, max=self.limit), torch.clamp(b, -self.limit, self.limit)
        return a * torch.sigmoid(self.alpha * a) * (b + self.glu_linear_offset)


class _Activation(BasicOperation):
    def __init__(self, *, cache_quantized_input=False):
        super().__init__()
        self.cache_quantized_input = cache_quantized_input

    def forward(self, x):
        a, b = x.chunk(2, dim=-1)
        return self.f(a) * b


class QGEGLU(_Activation):
    def f(self, a):
        return a * torch.sigmoid(1.702 * a)


class GEGLU(_Activation):
    def f(self, a):
        return a / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (a + 0.044715 * a**3)))


class ReGLU(_Activation):
    def f(self, a):
        return torch.relu(a)


class SReLU(_Activation):
    def forward(self, x):
        return torch.relu(x) ** 2


class _Scaled(BasicOperation):
    num_extra_inputs = 1

    def __init__(self, glu_interleave_size=None, *, activation_recompute_in_mlp=False, **options):
        super().__init__()
        self.glu_interleave_size = glu_interleave_size
        self.activation_recompute_in_mlp = activation_recompute_in_mlp
        self._clamped = self.activation(**options)

    def forward(self, x, scales):
        self._clamped.glu_interleave_size = self.glu_interleave_size
        return self._clamped(x) * scales.double()[:, None]


class ScaledSwiGLU(_Scaled):
    activation = SwiGLU


class ScaledClampedQGeGLU(_Scaled):
    activation = ClampedSwiGLU


class ScaledSReLU(BasicOperation):
    num_extra_inputs = 1

    def __init__(self, *, activation_recompute_in_mlp=False):
        super().__init__()
        self.activation_recompute_in_mlp = activation_recompute_in_mlp

    def forward(self, x, scales):
        return torch.relu(x) ** 2 * scales.double()[:, None]


class Sequential(nn.Module):
    def __init__(self, *args):
        super().__init__()
        for i, module in enumerate(args):
            self.add_module(str(i), module)

    def __iter__(self):
        return iter(self._modules.values())

    def forward(self, input, *extra_inputs):
        extra, x = list(extra_inputs), input.double()
        for module in self:
            x = module(x, *[extra.pop(0) for _ in range(module.num_extra_inputs)])
        assert not extra
        return x.to(input.dtype)


CLASSES = (
    GroupedLinear, SwiGLU, ClampedSwiGLU, QGEGLU, GEGLU, ReGLU, SReLU, ScaledSwiGLU, ScaledClampedQGeGLU,
    ScaledSReLU, Sequential,
)  # fmt: skip
MODULES = {"transformer_engine.pytorch.ops": {cls.__name__: cls for cls in CLASSES}}
