"""What an op is: a module whose meaning is a few lines of plain PyTorch, and whose backward is made of ops of the same
kind.

Names of values, as an op sees them:

- ``input``, ``output``: the rows that go in and come out; ``weight``, ``bias``, ...: its parameters;
- ``splits``, ``probs``, ...: the values that it takes by name (``runtime_inputs``) or hands on to later ops
  (``provides``);
- ``grad_<name>``: the gradient of any of these.
"""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fusedmoe import changes
from fusedmoe.checks import FLOATS, WRONG, Checked
from fusedmoe.errors import InputError
from fusedmoe.kernels.options import DEFAULT
from fusedmoe.ops import amax_state, random_state
from fusedmoe.process_state import HasProcessState
from fusedmoe.recipes import Node as Node

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from fusedmoe.formats import QuantizedSpec, Quantizer
    from fusedmoe.ops.quantize import WeightQuantization


class SpecLike(Protocol):
    """Whatever has a shape and a dtype: a tensor, or the `TensorSpec` of one that does not exist yet."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor that does not exist yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def exact(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype that elementwise arithmetic is done in: fp32 for narrower floats, else its own."""
    return x.to(torch.float32) if x.dtype in (torch.bfloat16, torch.float16) else x


def exact_together(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in the one dtype that arithmetic between them is done in: fp32, or fp64 where any is."""
    dtype = torch.float64 if any(t.dtype is torch.float64 for t in tensors) else torch.float32
    return [t.to(dtype) for t in tensors]


_T = TypeVar("_T")


def constant_in_graphs(function: _T) -> _T:
    """Mark a function whose result `torch.compile` takes for a constant: it runs when the graph is traced."""
    # what torch.compiler.assume_constant_result does, which imports all of Dynamo to do it
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def made_untraced(op: Callable[..., _T], *args: object, **kwargs: object) -> _T:
    """Return ``op(*args, **kwargs)``, for an op that is made within a call: `torch.export` does not record how its
    parameters are made. It is made in another thread, since the modes that record belong to a thread.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(op, *args, **kwargs).result()


Specs = TensorSpec | tuple[TensorSpec, ...]
Tensors = Tensor | tuple[Tensor, ...]


class Runnable(HasProcessState, nn.Module):
    """A module that `fusedmoe.modes` runs: an op that is called alone, or a `Sequential`."""

    _options = DEFAULT
    _parts_for_compiler: ClassVar[Callable[..., Any]]  # `fusedmoe.modes` defines it: an op knows nothing of plans

    @constant_in_graphs
    def _describe_for_compiler(self) -> None:
        for module in self.modules():
            if isinstance(module, Op):
                module.describe()


class Op(Checked, Runnable):
    """One step of a `Sequential`; also a module of its own.

    A subclass states what it takes and gives in the class attributes below, what it computes in `compute`, and, where
    the shape changes, `infer`. Its gradient comes from autograd unless `backward_ops` says otherwise. An inherited
    `backward_ops` says nothing of a `compute` that is not inherited.

    Attributes
    ----------
    parameter_names : tuple of str
        The parameters that `compute` takes, in order. An absent one (``bias=False``) is passed as ``None``.
    runtime_inputs : tuple of str
        The values that `compute` takes by name from the call, or from an earlier op that provides them, in order.
    provides : tuple of str
        The values that `compute` returns after its output, for later ops.
    rowwise_inputs : tuple of str
        Those of `runtime_inputs` that have one entry a row: their gradient is zero for rows that belong to no expert.
    applies : tuple of str
        Those of `runtime_inputs` that must take effect only once in a chain (a router probability).
    aliases : dict of str to str
        Fixed names for values whose own name is up to the user: what rules call them.
    zeroes_tail : bool
        Rows that belong to no expert come out as zeros, whatever came in.
    draws_random : bool
        `compute` draws random numbers, from the default generators: see the notes.
    changes_rows : bool
        Rows out are not rows in (`Dispatch`, `Combine`).
    contracts : dict of str to int
        Those of ``input``, ``weight``, ... that `compute` takes quantized, with the axis that it sums over: by rows
        (-1) or by columns (-2). Anything else comes as what it stands for.
    optional_inputs : tuple of str
        Derived values that `compute` takes last where the chain has them, and as None where it has not. An op that
        names ``"offsets"`` here may be given ``splits=`` when it is called alone.
    passes_forward, passes_backward : bool
        Whether rows, or their gradient, pass as they are: the op is then no step in that direction.
    launches : int
        Kernels that the plain-PyTorch path launches on a GPU, about: a term of the planner's cost.
    quantizes : Quantizer or None
        The quantizer of the output. `compute` then also takes ``axes=`` and ``training=``, and returns one
        `QuantizedTensor` per axis.
    quantizes_weight : Quantizer or None
        The quantizer of the weight of the linear layer that follows.
    only_quantizes : bool
        The op changes the format of values and nothing else: the linear layer whose weight it quantizes may follow
        after other ops of this kind.
    _checks, _fixed
        What the op's settings have to be; see `fusedmoe.checks.Checked`.

    Notes
    -----
    Whatever computes an op again (its backward pass, second derivatives) sets the generators to the states from which
    an op with ``draws_random`` drew the first time. A backward step has these states under the names ``random_state``
    and ``device_random_state``. `torch.compile` runs a chain with such an op uncompiled.
    """

    parameter_names: ClassVar[tuple[str, ...]] = ()
    runtime_inputs: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    rowwise_inputs: tuple[str, ...] = ()
    applies: tuple[str, ...] = ()
    aliases: Mapping[str, str] = {}
    contracts: ClassVar[Mapping[str, int]] = {}
    optional_inputs: tuple[str, ...] = ()
    passes_forward: bool = False
    passes_backward: bool = False
    draws_random: bool = False
    quantizes: Quantizer | None = None
    quantizes_weight: Quantizer | None = None
    only_quantizes: ClassVar[bool] = False
    zeroes_tail: ClassVar[bool] = False
    changes_rows: ClassVar[bool] = False
    launches: ClassVar[int] = 1
    _run_alone: ClassVar[Callable[[Op, Tensor, dict[str, Tensor]], Any]]  # as `_parts_for_compiler`

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if defined_before(cls, "compute", "backward_ops"):
            cls.backward_ops = Op.backward_ops  # type: ignore[method-assign]  # what it inherits is of another function

    def compute(self, x: Tensor, *args: Any) -> Tensors:
        """Return the output, or ``(output, *provides)``, of the rows, the parameters and the runtime inputs, in that
        order.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no compute()")

    def infer(self, x: SpecLike, *args: Any) -> Specs:
        """Check the arguments of `compute` and return the specs of what it will return; called before every call of it.

        Whatever only has a shape and a dtype can stand for a tensor here. The default is for ops that keep shape and
        dtype.

        Raises
        ------
        InputError
            An argument does not fit; see `reject`.
        """
        return TensorSpec(tuple(x.shape), x.dtype)

    def backward_ops(self) -> tuple[BackwardOp, ...]:
        """Return the steps of this op's backward, in the order in which the planner should see them.

        Steps that pass nothing on to the op before (weight and bias gradients) come first, the gradient of ``input``
        last, so that the gradients of neighbouring ops stand next to each other. Steps that no wanted gradient needs
        are dropped.
        """
        return (AutogradBackward(self),)

    def placed(self, following: Sequence[Op]) -> Op:
        """Return the op to run where these ops follow: itself, or one that has taken an open setting from them."""
        return self

    def weight_quantization(self, layer: Op) -> WeightQuantization:
        """Return the function that quantizes the weight of the linear layer that follows; see `quantizes_weight`."""
        raise NotImplementedError(f"{type(self).__name__} defines no weight_quantization()")

    def host_sync(self, x: SpecLike, device: torch.device) -> bool:
        """Whether the plain-PyTorch path on this device reads a tensor on the host."""
        return False

    def path(self, operands: Sequence[SpecLike | None], device: torch.device) -> str:
        """Return how the plain-PyTorch path multiplies quantized operands on this device, for ``explain()``:
        ``"native"``, ``"emulated"``, or ``""`` where there are none.
        """
        return ""

    def attributes(self) -> tuple[Hashable, ...]:
        """Whatever a fusion rule may look at, as a hashable value: a changed value means a new plan.

        These are the public attributes of the instance: what matters for the result must not start with an underscore.
        """
        state = self._of_process
        if state.attributes is None:
            public = {k: v for k, v in self.__dict__.items() if k[0] != "_"}
            for name, value in public.items():
                try:
                    hash(value)
                except TypeError:
                    expected = (
                        "something hashable, as a part of every plan's key: a tuple, or a name that starts with '_'"
                    )
                    raise self.reject(name, expected, type(value).__name__) from None
            state.attributes = tuple(public.items())
        return state.attributes

    def describe(self) -> str:
        """Return class and public attributes as a text, which stays up to date from then on: equal texts mean the same
        computation. What graphs of `torch.compile` are made for.
        """
        state = self._of_process
        if state.description is None:
            state.description = _description(self)
        return state.description

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        _note_change(self, name)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        _note_change(self, name)

    def reject(self, argument: str, expected: str, got: object) -> InputError:
        """Return the error for an argument that does not fit: ``raise self.reject("splits", "shape (4,)",
        splits.shape)``.
        """
        if isinstance(got, torch.Size):
            got = tuple(got)
        return InputError(f"{self!r}: {argument}: expected {expected}, got {got}")

    def check_floats(self, argument: str, dtype: torch.dtype) -> None:
        """Raise unless an argument has a dtype that elementwise arithmetic is done with."""
        if FLOATS.kept(dtype) is WRONG:
            raise self.reject(argument, FLOATS.expected, dtype)

    def forward(self, x: Tensor, /, **inputs: Tensor) -> Any:
        """Run the op alone, with its runtime inputs by name.

        Returns
        -------
        Tensor or (Tensor, dict of str to Tensor)
            The output; with it, of an op that provides values, those by name.
        """
        return self._run_alone(x, inputs)

    @property
    def amax_history(self) -> object:
        """What delayed scaling remembers: ``op.amax_history.input.amax``, ``.reference``, as ``state_dict`` has it."""
        return amax_state.by_role(self)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        amax_state.save(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        amax_state.load(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _note_change(op: Op, name: str) -> None:
    """Have `attributes`, and with them the plans, looked at again; not for a parameter that was set: FSDP2 sets
    each twice in every step, and a chain reads its parameters at every call.
    """
    if name in op._parameters:
        op._of_process.quantized_weight = None  # with FSDP2, the memory that a resharded weight must not hold
    elif name[0] != "_" or name == "__class__":
        state = op._of_process
        state.attributes = None
        if state.description is not None:
            state.description = _description(op)
        changes.note()


_numbers = itertools.count()


def _description(op: Op) -> str:
    attributes = ", ".join([f"{name}={value!r}" for name, value in op.attributes()])  # type: ignore[misc, has-type]
    kind = type(op)
    text = f"{kind.__module__}.{kind.__qualname__}({attributes})"
    if kind.__module__.partition(".")[0] == "fusedmoe" and not op._buffers and not op._modules:
        return text
    # somebody else's may depend on more: buffers, objects that do not say all of what they are
    state = op._of_process
    if state.number is None:
        state.number = next(_numbers)
    return f"{text} of process {os.getpid()}, number {state.number}"


def defined_before(cls: type, name: str, other: str) -> bool:
    """Whether a class has a name from a class ahead of the one that it has the other from."""
    first = next((c for c in cls.__mro__ if name in vars(c) or other in vars(c)), None)
    return first is not None and other not in vars(first)


class BackwardOp:
    """One step of an op's backward, in plain PyTorch; what a fusion rule with ``direction="backward"`` matches.

    Attributes
    ----------
    op : Op
        The op whose gradient it computes.
    needs : tuple of str
        The values that `compute` takes, in order, named as the op sees them. A gradient that does not arrive is
        ``None``.
    gives : tuple of str
        The values that `compute` returns, in order.
    unquantized : tuple of str
        Gradients among `needs` that `compute` takes as they were before they were quantized.
    may_give_none : bool
        A gradient among `gives` may be None although one arrives, because it was stored elsewhere. A fused step that
        covers other backward ops alone has to return tensors.
    contracts, quantizes, zeroes_tail, launches
        As for `Op`.
    """

    needs: tuple[str, ...] = ("grad_output", "input")
    gives: tuple[str, ...] = ("grad_input",)
    contracts: ClassVar[Mapping[str, int]] = {}
    unquantized: ClassVar[tuple[str, ...]] = ()
    quantizes: Quantizer | None = None
    may_give_none: ClassVar[bool] = False
    zeroes_tail: ClassVar[bool] = False
    launches: ClassVar[int] = 1

    def __init__(self, op: Op) -> None:
        self.op = op

    def infer(self, x: SpecLike, offsets: SpecLike | None) -> QuantizedSpec:
        """Return the spec of a quantized gradient by rows, for an op whose input is like x; see `quantizes`."""
        raise NotImplementedError(f"{type(self).__name__} defines no infer()")

    def compute(self, *args: Any) -> Any:
        """Return the tensors of `gives`, of those of `needs`."""
        raise NotImplementedError(f"{type(self).__name__} defines no compute()")

    def host_sync(self, x: SpecLike, device: torch.device) -> bool:
        """Whether this step reads a tensor on the host, ``x`` being what went into the op: as the op, by default."""
        return self.op.host_sync(x, device)

    def path(self, operands: Sequence[SpecLike | None], device: torch.device) -> str:
        """Return how this step multiplies quantized operands, those of `needs`: as `Op.path`."""
        return ""

    def only(self, gives: tuple[str, ...]) -> BackwardOp:
        """Return this step for callers that want just these of its `gives`; the default goes on giving all."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.op!r})"


class AutogradBackward(BackwardOp):
    """The gradient of any op: its ``compute`` is run again and differentiated by autograd. For ops that define no
    backward.
    """

    may_give_none = True  # for what `compute` does not depend on

    def __init__(self, op: Op, gives: tuple[str, ...] | None = None) -> None:
        super().__init__(op)
        self._arguments = ("input", *op.parameter_names, *op.runtime_inputs)
        self._outputs = ("output", *op.provides)
        states = random_state.NAMES if op.draws_random else ()
        self.needs = (*(f"grad_{name}" for name in self._outputs), *self._arguments, *states)
        self.gives = gives if gives is not None else tuple(f"grad_{name}" for name in self._arguments)

    def only(self, gives: tuple[str, ...]) -> AutogradBackward:
        return AutogradBackward(self.op, gives)

    def compute(self, *needs: Tensor | None) -> Tensors:
        count = len(self._outputs)
        grads, args = needs[:count], needs[count : count + len(self._arguments)]
        states: Any = needs[count + len(self._arguments) :] or None
        assert args[0] is not None
        wanted = [f"grad_{name}" in self.gives for name in self._arguments]
        again = torch.is_grad_enabled()  # the gradients are to be differentiated in their turn
        source = _differentiable_source if again else _source
        with torch.enable_grad(), random_state.drawing_again(states, args[0].device):
            args = tuple(a if a is None else source(a, w) for a, w in zip(args, wanted, strict=True))
            outputs = self.op.compute(*args)  # type: ignore[arg-type]
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        arrived = [(y, g) for y, g in zip(outputs, grads, strict=True) if g is not None and y.requires_grad]
        sources = [a for a, w in zip(args, wanted, strict=True) if w and a is not None]
        found = torch.autograd.grad(
            [y for y, _ in arrived],
            sources,
            [g for _, g in arrived],
            create_graph=again,
            allow_unused=True,
            materialize_grads=True,
        )
        return found[0] if len(found) == 1 else found


def _source(t: Tensor, wanted: bool) -> Tensor:
    """Return the same values as a leaf, which has a gradient if it is wanted."""
    return t.detach().requires_grad_(wanted)


def _differentiable_source(t: Tensor, wanted: bool) -> Tensor:
    """Return the same values where the graph goes on from them, at a place of their own if a gradient is wanted there:
    another argument may be computed from the same tensor.
    """
    if not wanted:
        return t
    return t.view_as(t) if t.requires_grad else _source(t, wanted)
