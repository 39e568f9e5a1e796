"""Convert Transformer Engine's op sequences to fusedmoe's and back, with copies of the weights.

    experts = from_te(te_experts)            # te_experts(x, splits, probs, splits)
    experts(x, splits=splits, probs=probs)
    te_experts = to_te(experts)

============================================ ===========================================================
``transformer_engine.pytorch.ops``           ``fusedmoe``
============================================ ===========================================================
``GroupedLinear(E, in, out, bias=True)``     ``GroupedLinear(E, in, out, bias=True)``
``SwiGLU()``                                 ``SwiGLU()``
``ClampedSwiGLU(limit=, alpha=, ...)``       ``SwiGLU(limit=, alpha=, offset=)``, offset ``glu_linear_offset``
``QGEGLU()``                                 ``SwiGLU(alpha=1.702)``
``GEGLU()``                                  ``GeGLU("tanh")``
``ReGLU()``                                  ``ReGLU()``
``SReLU()``                                  ``SquaredReLU()``
``ScaledSwiGLU()``                           ``SwiGLU(), Scale("probs")``
``ScaledClampedQGeGLU(limit=, alpha=, ...)`` ``SwiGLU(limit=, alpha=, offset=), Scale("probs")``
``ScaledSReLU()``                            ``SquaredReLU(), Scale("probs")``
============================================ ===========================================================

Both libraries activate the first half of the features. (Transformer Engine's kernels call the linear second half the
gate.) With Transformer Engine's ``glu_interleave_size=s``, blocks of s features of the two halves alternate. Then the
rows of the preceding layer are reordered: to [gate; up] for fusedmoe, to blocks for Transformer Engine. s = 1 is
``interleaved=True``, without reordering.

A layer of Transformer Engine has the weights ``weight0`` and so on, or one ``weight``; a layer of fusedmoe has one
weight (E, out, in). The conversion drops ``main_grad``, hooks, quantization state, and recipes set by contexts.

The first call imports Transformer Engine, which needs CUDA. Source of the interface:
``transformer_engine.pytorch.ops``, Transformer Engine 2.20. The tests use a stand-in with its names, signatures and
documented formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fusedmoe.base.checks import POSITIVE_INTEGER
from fusedmoe.base.errors import InputError
from fusedmoe.layers.sequential import Sequential
from fusedmoe.numerics.recipes import shortest
from fusedmoe.ops import GLU, GeGLU, GroupedLinear, Op, ReGLU, Scale, SquaredReLU, SwiGLU

_QUICK = 1.702  # alpha of QGEGLU
_NAMES = (
    "GroupedLinear", "SwiGLU", "ClampedSwiGLU", "QGEGLU", "GEGLU", "ReGLU", "SReLU",
    "ScaledSwiGLU", "ScaledClampedQGeGLU", "ScaledSReLU",
)  # fmt: skip
_WITHOUT_SETTINGS: dict[str, Callable[[], Op]] = {
    "SwiGLU": SwiGLU,
    "QGEGLU": lambda: SwiGLU(alpha=_QUICK),
    "GEGLU": GeGLU,
    "ReGLU": ReGLU,
    "SReLU": SquaredReLU,
}
_WITH_BLOCKS = ("SwiGLU", "ClampedSwiGLU", "ScaledSwiGLU", "ScaledClampedQGeGLU")


def from_te(sequential: Any) -> Sequential:
    """Convert a ``transformer_engine.pytorch.ops.Sequential`` of grouped ops.

    Parameters
    ----------
    sequential
        Any number of the ops in the table above. Called as ``sequential(x, *extra_inputs)``, it takes the splits for
        each ``GroupedLinear`` and the scales for each ``Scaled...``, in order. The result takes ``splits=`` and
        ``probs=`` once.

    Returns
    -------
    Sequential
        Its parameters are copies with the same dtype, device and ``requires_grad``. Its ops are numbered; an activation
        and its scale count as two.

    Raises
    ------
    InputError
        - ``sequential`` has another op or a quantized weight.
        - An op has a setting without an equivalent: ``scale_bias``, ``delay_wgrad_compute``, ``cache_quantized_input``
          or ``activation_recompute_in_mlp``.
        - An activation has a block size and no ``GroupedLinear`` before it.
    """
    import transformer_engine.pytorch.ops as te_ops

    if not isinstance(sequential, te_ops.Sequential):
        raise InputError(
            f"from_te: sequential: expected a transformer_engine.pytorch.ops.Sequential, got {_kind(sequential)}"
        )
    ops = [_TEOp(f"from_te: {place}.{type(op).__name__}", op, te_ops) for place, op in enumerate(sequential)]
    found: list[Op] = []
    for op, following in zip(ops, [*ops[1:], None], strict=True):
        if op.name == "GroupedLinear":
            found.append(op.linear(None if following is None else following.block_size))
            continue
        if op.block_size not in (None, 1) and (not found or not isinstance(found[-1], GroupedLinear)):
            raise InputError(
                f"{op.where}: glu_interleave_size: expected 1 or None without a GroupedLinear before it, whose rows "
                f"could be reordered; got {op.block_size}"
            )
        found += op.activation()
    return Sequential(*found)


def to_te(sequential: Sequential, glu_interleave_size: int | None = None) -> Any:
    """Convert a `Sequential` of grouped ops to a ``transformer_engine.pytorch.ops.Sequential``.

    The parameters of the result are copies with the same dtype, device and ``requires_grad``. Its call takes the
    inputs of each op in order: ``y = te(x, splits, probs, splits)``.

    Raises `InputError`: ``sequential`` has an op or a combination that Transformer Engine lacks, or a layer that has no
    parameters, has a recipe, or is in fp64.

    Parameters
    ----------
    sequential
        Ops in the table above; a nested `Sequential` is flattened.
    glu_interleave_size
        Block size in which gate and up alternate in Transformer Engine: 32 for its fused kernels. None keeps the layout
        of ``sequential``.
    """
    glu_interleave_size = POSITIVE_INTEGER.or_none()("to_te: glu_interleave_size", glu_interleave_size)
    import transformer_engine.pytorch.ops as te_ops

    if type(sequential) is not Sequential:
        raise InputError(f"to_te: sequential: expected a fusedmoe.Sequential, got {_kind(sequential)}")
    ops = list(_flat(sequential))
    found: list[Any] = []
    before: nn.Module | None = None
    for place, (op, following) in enumerate(zip(ops, [*ops[1:], None], strict=True)):
        where = f"to_te: {place}.{type(op).__name__}"
        if type(op) is GroupedLinear:
            found.append(_linear_to_te(where, op, te_ops, *_block_sizes(following, glu_interleave_size)))
        elif not (isinstance(op, Scale) and isinstance(before, GLU | SquaredReLU)):  # else part of the activation's op
            name, settings = _equivalent(where, op, isinstance(following, Scale))
            now, then = _block_sizes(op, glu_interleave_size)
            if then is not None:
                if name not in _WITH_BLOCKS or (now != then and type(before) is not GroupedLinear):
                    raise InputError(
                        f"{where}: expected gate and up as halves, got blocks of {then}: {name} takes no blocks, or no "
                        f"GroupedLinear precedes it"
                    )
                settings["glu_interleave_size"] = then
            if not hasattr(te_ops, name):
                raise InputError(f"{where}: this version of Transformer Engine has no {name}: update it")
            found.append(getattr(te_ops, name)(**settings))
        before = op
    return te_ops.Sequential(*found)


class _TEOp:
    """An op of Transformer Engine, to be converted. Raises `InputError` if it has no equivalent."""

    def __init__(self, where: str, op: Any, te_ops: Any) -> None:
        self.where, self.op, self.name = where, op, type(op).__name__
        # not isinstance: SiTUGLU is a subclass of SwiGLU with another formula
        if self.name not in _NAMES or type(op) is not getattr(te_ops, self.name, None):
            raise InputError(f"{where}: expected one of {', '.join(_NAMES)}, got {_kind(op)}")
        store = getattr(op, "wgrad_store", None)
        settings = {
            "scale_bias": getattr(op, "_scale_bias", False),
            "delay_wgrad_compute": store is not None and store.delay_wgrad_compute(),
            "cache_quantized_input": getattr(op, "cache_quantized_input", False),
            "activation_recompute_in_mlp": getattr(op, "activation_recompute_in_mlp", False),
            "quantized weights": getattr(op, "_with_quantized_weight", False),
        }
        for setting, given in settings.items():
            if given:
                raise InputError(f"{where}: {setting}: expected none, since fusedmoe has no equivalent, got {given!r}")

    @property
    def block_size(self) -> int | None:
        """Block size in which gate and up alternate; None for halves."""
        size: int | None = getattr(self.op, "glu_interleave_size", None)
        return size

    def linear(self, block_size: int | None) -> GroupedLinear:
        """Return the layer, with rows reordered for the `activation` of the next op, which has this block size."""
        op = self.op
        weight, bias = self._packed("weight"), self._packed("bias")
        assert weight is not None
        layer = GroupedLinear(
            op.num_groups,
            op.in_features,
            op.out_features,
            bias=bias is not None,
            device=weight.device,
            dtype=weight.dtype,
            accumulate_into_main_grad=op._accumulate_into_main_grad,
        )
        then = 1 if block_size == 1 else None
        for name, packed in (("weight", weight), ("bias", bias)):
            if packed is not None:
                rows = _reordered(self.where, packed, block_size, then)
                setattr(layer, name, nn.Parameter(rows.contiguous(), packed.requires_grad))
        return layer

    def _packed(self, name: str) -> Tensor | None:
        """Return the parameters of all experts as one new tensor; None if they do not exist."""
        op = self.op
        whole = op._parameters.get(name)
        if whole is not None:
            tail = (op.out_features, op.in_features)[: 2 if name == "weight" else 1]
            data: Tensor = getattr(whole, "rowwise_data", whole)  # the data of a GroupedTensor
            return data.detach().clone().view(op.num_groups, *tail).requires_grad_(whole.requires_grad)
        parts = [op._parameters.get(f"{name}{i}") for i in range(op.num_groups)]
        if all(part is None for part in parts):
            return None
        trained = {part.requires_grad for part in parts}
        if len(trained) > 1:
            raise InputError(f"{self.where}: {name}: expected the same requires_grad for all experts, got both")
        return torch.stack([part.detach() for part in parts]).requires_grad_(trained.pop())

    def activation(self) -> list[Op]:
        """Return the activation, followed by its scale, if any."""
        op, activation = self.op, self.name.removeprefix("Scaled")
        if activation in ("ClampedSwiGLU", "ClampedQGeGLU"):
            clamp = getattr(op, "_clamped", op)
            found: Op = SwiGLU(limit=clamp.limit, alpha=clamp.alpha, offset=clamp.glu_linear_offset)
        else:
            found = _WITHOUT_SETTINGS[activation]()
        if isinstance(found, GLU):
            found.interleaved = self.block_size == 1
        return [found, Scale("probs")] if activation != self.name else [found]


def _linear_to_te(where: str, layer: GroupedLinear, te_ops: Any, now: int | None, then: int | None) -> Any:
    if layer._parameters.get("weight") is None or layer.recipe is not None:
        got = f"recipe={shortest(layer.recipe)!r}" if layer.recipe is not None else "no weight"
        raise InputError(f"{where}: expected a layer with parameters and without a recipe, got {got}")
    if layer.weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise InputError(f"{where}: weight: expected fp32, fp16 or bf16, got {layer.weight.dtype}")
    op = te_ops.GroupedLinear(
        layer.num_groups,
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        device=layer.weight.device,
        dtype=layer.weight.dtype,
        accumulate_into_main_grad=layer.accumulate_into_main_grad,
    )
    for name, packed in layer.named_parameters():
        for i, part in enumerate(_reordered(where, packed.detach(), now, then)):
            parameter = getattr(op, f"{name}{i}")
            parameter.data.copy_(part)
            parameter.requires_grad_(packed.requires_grad)
    return op


def _equivalent(where: str, op: nn.Module, scaled: bool) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings of the equivalent op of Transformer Engine."""
    prefix = "Scaled" if scaled else ""
    if type(op) is SquaredReLU:
        return f"{prefix}SReLU", {}
    if type(op) is SwiGLU and op.limit is not None:
        settings = {"limit": op.limit, "alpha": op.alpha, "glu_linear_offset": op.offset}
        return "ScaledClampedQGeGLU" if scaled else "ClampedSwiGLU", settings
    if isinstance(op, GLU) and op.limit is None and op.offset == 0:
        if type(op) is SwiGLU and op.alpha == 1:
            return f"{prefix}SwiGLU", {}
        if type(op) is SwiGLU and op.alpha == _QUICK and not scaled:
            return "QGEGLU", {}
        if type(op) is GeGLU and (op.approximate, op.alpha) == ("tanh", 1) and not scaled:
            return "GEGLU", {}
        if type(op) is ReGLU and not scaled:
            return "ReGLU", {}
    raise InputError(
        f"{where}: expected an op with an equivalent among {', '.join(_NAMES)}; got {op!r}"
        f"{' and a Scale' if scaled else ''}"
    )


def _block_sizes(op: nn.Module | None, wanted: int | None) -> tuple[int | None, int | None]:
    """Return the current and the wanted block size of an op's gate and up; None for halves."""
    if not isinstance(op, GLU):
        return None, None
    now = 1 if op.interleaved else None
    return now, wanted or now


def _reordered(where: str, rows: Tensor, now: int | None, then: int | None) -> Tensor:
    """Reorder (E, 2 I, ...) from alternating gate and up blocks of size ``now`` to size ``then``; None: halves."""
    if now == then:
        return rows
    for size in (now, then):
        if size is not None and rows.shape[1] % (2 * size):
            raise InputError(
                f"{where}: expected a multiple of twice the block size {size} as out_features, got {rows.shape[1]}"
            )
    if now is not None:
        rows = rows.unflatten(1, (-1, 2, now)).transpose(1, 2).flatten(1, 3)
    if then is not None:
        rows = rows.unflatten(1, (2, -1, then)).transpose(1, 2).flatten(1, 3)
    return rows


def _flat(sequential: Sequential) -> Iterator[nn.Module]:
    for op in sequential:
        if type(op) is Sequential:
            yield from _flat(op)
        else:
            yield op


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
