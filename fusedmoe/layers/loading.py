"""`load_experts`: copy the weights of another implementation, in its layout, into layers of this package.

Axes: E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from fusedmoe.base.checks import FLAG, FLOATS, WRONG
from fusedmoe.base.errors import InputError
from fusedmoe.expert_parallel import ExpertParallel
from fusedmoe.layers.moe import MoE
from fusedmoe.ops.glu import GLU
from fusedmoe.ops.grouped_linear import GroupedLinear, Linear

Weights: TypeAlias = Tensor | Iterable[Tensor | nn.Linear]
Biases: TypeAlias = Tensor | Iterable[Tensor]

_Layer = TypeVar("_Layer", bound=nn.Module)


class _Source(NamedTuple):
    """The contents of one argument: a weight (out, in) per expert, and biases (out,) or None."""

    weights: list[Tensor]
    biases: list[Tensor] | None


@torch.no_grad()
def load_experts(
    layer: _Layer,
    *,
    down: Weights,
    gate: Weights | None = None,
    up: Weights | None = None,
    gate_up: Weights | None = None,
    router: Tensor | nn.Linear | None = None,
    gate_bias: Biases | None = None,
    up_bias: Biases | None = None,
    gate_up_bias: Biases | None = None,
    down_bias: Biases | None = None,
    router_bias: Tensor | None = None,
    transposed: bool = False,
    interleaved: bool = False,
) -> _Layer:
    """Copy the experts' weights of another implementation into a layer, and return the layer.

    Parameters keep their dtype, device and identity, so that an existing optimizer remains valid. All arguments are
    checked before any copy.

    With expert parallelism, weights and biases are those of all E experts, of which the rank takes its own, or those
    of the rank's experts alone.

    Raises `InputError`: an argument is missing, conflicts with another one, or has the wrong shape or dtype. The
    message names the argument, the expert, the expected shape and the actual shape.

    Parameters
    ----------
    layer
        An `MoE`, or a `Sequential` with two `GroupedLinear` (or two `Linear`, which count as one expert).
    gate, up, down
        Weights per expert, (I, H), (I, H) and (H, I): a sequence of E ``nn.Linear`` or tensors, or one stacked tensor,
        such as (E, I, H). The nonlinearity applies to ``gate``. An activation without a gate takes only ``up``.
    gate_up
        Gate and up in one tensor, in place of the two: (2 I, H) per expert, with rows ``[gate; up]``.
    router
        (E, H), also with ``transposed``, or the ``nn.Linear``. An `MoE` requires it; a `Sequential` has no router.
    gate_bias, up_bias, gate_up_bias, down_bias, router_bias
        Biases (E, features), or a sequence of E, for weights given as tensors. An ``nn.Linear`` has its own.
    transposed
        Expert weights given as tensors are ``(in, out)``, as in ``x @ weight``: (E, H, 2 I) and (E, I, H). Does not
        apply to ``nn.Linear``. If only one tensor is transposed, pass its ``.mT`` instead.
    interleaved
        Rows of ``gate_up`` alternate, gate first: ``gate_up[0::2]`` is the gate. The layer stores them in the order of
        its activation.

    Examples
    --------
    >>> layer = MoE(hidden=64, intermediate=32, num_experts=8, top_k=2)
    >>> load_experts(
    ...     layer,
    ...     gate=[expert.w1 for expert in block.experts],
    ...     up=[expert.w3 for expert in block.experts],
    ...     down=[expert.w2 for expert in block.experts],
    ...     router=block.gate,
    ... )
    """
    FLAG("load_experts: transposed", transposed)
    FLAG("load_experts: interleaved", interleaved)
    chain: nn.Module = layer.experts if isinstance(layer, MoE) else layer
    first, last = _two_layers(chain)
    wide = last.in_features
    if first.out_features not in (wide, 2 * wide):
        raise _wrong("layer", f"a first layer with {wide} or {2 * wide} features out", first.out_features)
    gated = first.out_features == 2 * wide
    weights = {"gate": gate, "up": up, "gate_up": gate_up, "down": down}
    biases = {"gate": gate_bias, "up": up_bias, "gate_up": gate_up_bias, "down": down_bias}
    names = _names(weights, biases, gated, interleaved)
    own = _halves(wide, any(op.interleaved for op in chain.modules() if isinstance(op, GLU)))
    theirs = _halves(wide, interleaved)
    everything = slice(None)
    # per argument: the layer's features to copy to, and the argument's features to copy
    places = {
        "gate": [(own[0], everything)],
        "up": [(own[1] if gated else everything, everything)],
        "gate_up": list(zip(own, theirs, strict=True)),
        "down": [(everything, everything)],
    }
    copies: list[tuple[Tensor, list[Tensor]]] = []
    for name in names:
        op = last if name == "down" else first
        weight, bias = _parameters(op)
        features = 2 * wide if name == "gate_up" else wide if op is first else last.out_features
        ranks = op.expert_parallel if isinstance(op, GroupedLinear) else None
        shape = (len(weight), features, op.in_features)
        parts = [_of_this_rank(given, len(weight), ranks) for given in (weights[name], biases[name])]
        source = _source(name, parts[0], parts[1], shape, transposed, 1 if ranks is None else ranks.ranks)
        for into, part in places[name]:
            copies += _copies(name, weight, bias, source, into, part)
    if isinstance(layer, MoE):
        copies += _router(layer, router, router_bias)
    elif router is not None or router_bias is not None:
        raise _wrong("router", f"none, since a {type(layer).__name__} has no router", "one")
    # clone sources that share memory with the layer, so that no copy overwrites the source of a later one
    own_memory = {_memory(target) for target, _ in copies}
    sources = [[t.clone() if _memory(t) in own_memory else t for t in tensors] for _, tensors in copies]
    for (target, _), tensors in zip(copies, sources, strict=True):
        for part, tensor in zip(target, tensors, strict=True):
            part.copy_(tensor)
    return layer


def _memory(tensor: Tensor) -> int:
    """Return an id of a tensor's storage, also if it has no address (a fake tensor)."""
    return int(tensor.untyped_storage()._cdata)


def _wrong(argument: str, expected: str, got: object) -> InputError:
    return InputError(f"load_experts: {argument}: expected {expected}, got {got}")


def _two_layers(chain: object) -> tuple[GroupedLinear | Linear, GroupedLinear | Linear]:
    modules = chain.modules() if isinstance(chain, nn.Module) else ()
    found = [op for op in modules if isinstance(op, GroupedLinear | Linear)]
    if len(found) != 2 or type(found[0]) is not type(found[1]):
        got = ", ".join(type(op).__name__ for op in found) or type(chain).__name__
        raise _wrong("layer", "an MoE, or a Sequential with two GroupedLinear or two Linear", got)
    for op in found:
        if op.weight_format is not None:
            raise _wrong("layer", "layers with unquantized weights; see GroupedLinear.from_quantized", repr(op))
    return found[0], found[1]


def _names(
    weights: dict[str, Weights | None], biases: dict[str, Biases | None], gated: bool, interleaved: bool
) -> list[str]:
    """Return the names of the given weights; raise unless the layer takes this combination."""
    names = [name for name, weight in weights.items() if weight is not None]
    if names not in ([["gate", "up", "down"], ["gate_up", "down"]] if gated else [["up", "down"]]):
        expected = "gate and up, or gate_up" if gated else "up without gate, since the activation has no gate"
        raise _wrong("gate, up, gate_up", expected, " and ".join(names[:-1]) or "none of them")
    if interleaved and "gate_up" not in names:
        got = "separate gate and up" if gated else "only up"
        raise _wrong("interleaved", "gate_up, whose rows may alternate", got)
    for name, bias in biases.items():
        if bias is not None and name not in names:
            raise _wrong(f"{name}_bias", f"it together with {name}", "it alone")
    return names


def _halves(wide: int, interleaved: bool) -> tuple[slice, slice]:
    """Return the features of gate and of up among the 2 I features of both."""
    if interleaved:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, wide), slice(wide, None)


def _parameters(op: GroupedLinear | Linear) -> tuple[Tensor, Tensor | None]:
    """Return weight (E, out, in) and bias (E, out) as targets of a copy."""
    weight: Tensor | None = op.weight  # None after `without_parameters`
    if weight is None or weight.is_meta:
        got = "none" if weight is None else "parameters on the meta device"
        raise _wrong("layer", "parameters with memory: call layer.to_empty(device=...) first", got)
    if hasattr(weight, "full_tensor"):
        raise _wrong("layer", "plain parameters: load before they are sharded", "DTensors")
    if isinstance(op, GroupedLinear):
        return op.weight, op.bias
    return op.weight.unsqueeze(0), None if op.bias is None else op.bias.unsqueeze(0)


def _of_this_rank(given: Any, here: int, ranks: ExpertParallel | None) -> Any:
    """Return the part for this rank, which has ``here`` experts, of an argument that has the experts of all ranks."""
    if ranks is None or not isinstance(given, Iterable):
        return given
    given = given if isinstance(given, Tensor) else list(given)
    if isinstance(given, Tensor) and (not given.dim() or hasattr(given, "full_tensor")):
        return given  # which is refused later
    return given[ranks.rank * here : (ranks.rank + 1) * here] if len(given) == ranks.ranks * here else given


def _source(
    name: str,
    weights: Weights | None,
    biases: Biases | None,
    shape: tuple[int, int, int],
    transposed: bool,
    ranks: int = 1,
) -> _Source:
    """Check one argument against its required shape (E, out, in) and return its contents.

    ``ranks`` times E experts are accepted too, see `_of_this_rank`.
    """
    experts, features_out, features_in = shape
    linear_shape = (features_out, features_in)
    stored = linear_shape[::-1] if transposed else linear_shape
    remedy = "; for (out, in) omit transposed" if transposed else "; for (in, out) pass transposed=True"
    listed = _listed(name, weights, (experts, *stored), remedy, ranks)
    own_biases = [item.bias for item in listed if isinstance(item, nn.Linear) and item.bias is not None]
    if own_biases and (len(own_biases) < experts or biases is not None):
        expected = f"a bias in every nn.Linear of {name} and no {name}_bias, or no bias in any"
        raise _wrong(f"{name}_bias", expected, f"{len(own_biases)} of {experts}")
    found = []
    for i, item in enumerate(listed):
        if isinstance(item, nn.Linear):
            _check(f"{name}[{i}]", item.weight, linear_shape)
            found.append(item.weight)
        else:
            _check(f"{name}[{i}]", item, stored, remedy)
            found.append(item.mT if transposed else item)
    if biases is None:
        return _Source(found, list(own_biases) or None)
    listed_biases = _listed(f"{name}_bias", biases, (experts, features_out), "", ranks)
    for i, bias in enumerate(listed_biases):
        _check(f"{name}_bias[{i}]", bias, (features_out,))
    return _Source(found, [bias for bias in listed_biases if isinstance(bias, Tensor)])


def _listed(
    name: str, given: Weights | None, shape: tuple[int, ...], remedy: str, ranks: int
) -> list[Tensor] | list[Tensor | nn.Linear]:
    """Return one item per expert, from a sequence or from one tensor of this shape."""
    also = f", or {ranks * shape[0]} experts of all ranks" if ranks > 1 else ""
    if isinstance(given, Tensor):
        _check(name, given, shape, remedy, also)
        return list(given.unbind(0))
    if not isinstance(given, Iterable):
        raise _wrong(name, f"a tensor {shape} or {shape[0]} nn.Linear or tensors", type(given).__name__)
    listed = list(given)
    if len(listed) != shape[0]:
        raise _wrong(name, f"{shape[0]} experts{also}", len(listed))
    for i, item in enumerate(listed):
        if not isinstance(item, Tensor | nn.Linear):
            raise _wrong(f"{name}[{i}]", "an nn.Linear or a tensor", f"{type(item).__module__}.{type(item).__name__}")
    return listed


def _check(name: str, tensor: object, shape: tuple[int, ...], remedy: str = "", also: str = "") -> None:
    """Raise unless the tensor can be copied from. ``remedy`` is for a matrix whose transpose has the shape."""
    if not isinstance(tensor, Tensor):
        raise _wrong(name, "a tensor", type(tensor).__name__)
    if hasattr(tensor, "full_tensor"):
        raise _wrong(name, "a plain tensor: load before parameters are sharded, or pass .full_tensor()", "a DTensor")
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise _wrong(name, "a dense tensor", "a nested one" if tensor.is_nested else tensor.layout)
    if tuple(tensor.shape) != shape:
        fits = (*tensor.shape[:-2], *tensor.shape[:-3:-1]) == shape
        raise _wrong(name, f"shape {shape}{also}", f"{tuple(tensor.shape)}{remedy if fits else ''}")
    if FLOATS.kept(tensor.dtype) is WRONG:
        raise _wrong(name, "floats of 16 bits or more: dequantize codes first", tensor.dtype)
    if tensor.is_meta:
        raise _wrong(name, "a tensor with contents", "one on the meta device")


def _copies(
    name: str, weight: Tensor, bias: Tensor | None, source: _Source, into: slice, part: slice
) -> list[tuple[Tensor, list[Tensor]]]:
    """Return pairs of a target in the layer and the sources to copy to it, one per expert."""
    if (bias is None) != (source.biases is None):
        has, came = ("none", "biases") if bias is None else ("biases", "none")
        raise _wrong(f"{name}_bias", f"{has}, since the layer has bias={bias is not None}", came)
    copies = [(weight[:, into], [tensor[part] for tensor in source.weights])]
    if bias is not None and source.biases is not None:
        copies.append((bias[:, into], [tensor[part] for tensor in source.biases]))
    return copies


def _router(layer: MoE, router: Tensor | nn.Linear | None, bias: Tensor | None) -> list[tuple[Tensor, list[Tensor]]]:
    own = layer.router
    if router is None:
        raise _wrong("router", "a weight (E, H) for the MoE's router; layer.router.weight leaves it unchanged", "none")
    if isinstance(router, Tensor):
        _check("router", router, tuple(own.weight.shape), "; transposed does not apply to a router: pass its .T")
    source = _source("router", [router], None if bias is None else [bias], (1, *own.weight.shape), False)
    own_bias = None if own.bias is None else own.bias.unsqueeze(0)
    return _copies("router", own.weight.unsqueeze(0), own_bias, source, slice(None), slice(None))
