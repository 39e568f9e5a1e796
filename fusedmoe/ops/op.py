"""The base classes `Op` and `BackwardOp`. An op is a module that a few lines of plain PyTorch define.

Names of an op's values:

- ``input``, ``output``: the rows; ``weight``, ``bias``, ...: its parameters;
- ``splits``, ``probs``, ...: the values that it takes by name (``runtime_inputs``) or provides to later ops
  (``provides``);
- ``grad_<name>``: the gradient of any of these.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from fusedmoe.base import changes
from fusedmoe.base.checks import FLOATS, WRONG, Checked
from fusedmoe.base.errors import InputError
from fusedmoe.base.process_state import HasProcessState
from fusedmoe.base.specs import SpecLike as SpecLike
from fusedmoe.base.specs import TensorSpec as TensorSpec
from fusedmoe.expert_parallel.shards import check_shard
from fusedmoe.kernels.options import DEFAULT
from fusedmoe.numerics import recipes
from fusedmoe.numerics.formats import Format, QuantizedSpec, Quantizer
from fusedmoe.ops.state import amax, random


def exact(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype of elementwise arithmetic: fp32 for bf16 and fp16, else its own."""
    return x.to(torch.float32) if x.dtype in (torch.bfloat16, torch.float16) else x


def exact_together(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in the common dtype of their arithmetic: fp64 if any is fp64, else fp32."""
    dtype = torch.float64 if any(t.dtype is torch.float64 for t in tensors) else torch.float32
    return [t.to(dtype) for t in tensors]


_T = TypeVar("_T")


def constant_in_graphs(function: _T) -> _T:
    """Mark a function whose result is a constant for `torch.compile`, which then calls it while tracing."""
    # torch.compiler.assume_constant_result does the same, but imports Dynamo
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def made_untraced(op: Callable[..., _T], *args: object, **kwargs: object) -> _T:
    """Return ``op(*args, **kwargs)``, hidden from `torch.export`, for an op that is constructed during a call.

    The modes of `torch.export` would record the creation of the parameters. They are per thread, so another thread
    constructs the op.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(op, *args, **kwargs).result()


Specs = TensorSpec | tuple[TensorSpec, ...]
Tensors = Tensor | tuple[Tensor, ...]


class Caller:
    """The functions that run a call. `fusedmoe.call.modes` registers them, since ops cannot import the planner."""

    run: Callable[..., Any]  # `fusedmoe.call.modes.run`
    parts_for_compiler: Callable[..., Any]  # `fusedmoe.call.modes.parts_for_compiler`

    def register(self, *, run: Callable[..., Any], parts_for_compiler: Callable[..., Any]) -> None:
        """Set both functions."""
        self.run, self.parts_for_compiler = run, parts_for_compiler


caller = Caller()


class Runnable(HasProcessState, nn.Module):
    """A module that `fusedmoe.call.modes` runs: an op that is called alone, a `Sequential`, or an `MoE`."""

    _options = DEFAULT
    _chained_names: ClassVar[tuple[str, ...] | None] = None  # the names of the modules that a call runs; None: all

    def _chained(self) -> list[tuple[str, nn.Module | None]]:
        """Return the modules that a call runs one after the other, with their names."""
        modules, names = self._modules, self._chained_names
        return [*modules.items()] if names is None else [(name, modules[name]) for name in names]

    @staticmethod
    def _opens(module: object) -> TypeGuard[Runnable]:
        """Whether one of these modules is replaced by its own ones."""
        return False

    @constant_in_graphs  # Dynamo takes only methods of a module whose arguments include the module
    def _parts_for_compiler(self, *around: Any) -> Any:
        """Return the parts of the module for `fusedmoe.call.compile.tracing`. Dynamo guards on ``around``."""
        return caller.parts_for_compiler(self, *around)

    @constant_in_graphs
    def _describe_for_compiler(self) -> None:
        for module in self.modules():
            if isinstance(module, Op):
                module.describe()


class Op(Checked, Runnable):
    """One step of a `Sequential`, which can also be called alone.

    A subclass names its inputs and outputs in the class attributes below, and defines `compute`. If the op changes the
    shape or dtype, the subclass also defines `infer`. Autograd computes the gradient unless the class defines
    `backward_ops`. A subclass that overrides `compute` does not inherit `backward_ops`.

    - ``passes_forward``, ``passes_backward`` (bool): whether the op leaves rows, or their gradient, unchanged. An op
      that passes rows forward has no step in that direction, unless it provides values: `compute` and `infer` then
      return these alone, and the op must define `backward_ops`. An op that passes gradients backward has no step in
      that direction.
    - ``_checks``, ``_fixed``: see `fusedmoe.base.checks.Checked`.

    A recomputation of an op with ``draws_random`` (backward pass, second derivatives) first sets the generators to
    their states before the original call. Backward steps can read these states as ``random_state`` and
    ``device_random_state``. `torch.compile` runs a chain with such an op uncompiled.
    """

    #: The parameters that `compute` takes, in order. A missing one (``bias=False``) is passed as ``None``.
    parameter_names: ClassVar[tuple[str, ...]] = ()
    #: The values that `compute` takes by name, in order, from the call or from an earlier op that provides them.
    runtime_inputs: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()  #: The values that `compute` returns after its output, for later ops
    #: Further values for later ops. If one of them is read, `compute` and `infer` are called with ``all_values=True``,
    #: and return all of them after those of `provides`. The op must define `backward_ops`.
    provides_if_read: ClassVar[tuple[str, ...]] = ()
    #: Names of gradients that a backward op gives to later backward ops of the same op: ``"logits"`` for
    #: ``grad_logits``. Each is mapped to the provided value that has its shape and dtype.
    stages: ClassVar[Mapping[str, str]] = {}
    #: The `runtime_inputs` with one entry per row. Their gradient is zero for rows without an expert.
    rowwise_inputs: tuple[str, ...] = ()
    #: The `runtime_inputs` that may be applied only once in a chain, such as a router probability.
    applies: tuple[str, ...] = ()
    aliases: Mapping[str, str] = {}  #: Fixed names, for rules, of values that the user names
    #: The values that are rows of another value: ``{"output": ("input", "token_of_row")}`` means ``output[r] =
    #: input[token_of_row[r]]``, with an int32 index within the rows of ``input``. Rules may read such rows through
    #: their source and index, see `fusedmoe.fusion.language.rule.Step`. For rows without an expert, the op may write
    #: other values.
    gathers: ClassVar[Mapping[str, tuple[str, str]]] = {}
    #: Values for rules and `gathers`, which `compute` does not take: ``{"token_of_row": "slot_of_row"}`` means the
    #: ``token_of_row`` of the op in the chain that provides ``slot_of_row``, if it provides both.
    provided_with: ClassVar[Mapping[str, str]] = {}
    #: The operands that `compute` accepts in quantized form, each with the axis that `compute` sums over: -1 by rows,
    #: -2 by columns. All other operands are dequantized.
    contracts: ClassVar[Mapping[str, int]] = {}
    #: Derived values that `compute` takes after all others; None for a value that the chain does not have. With
    #: ``"offsets"``, the op accepts ``splits=`` when it is called alone.
    optional_inputs: tuple[str, ...] = ()
    passes_forward: bool = False
    passes_backward: bool = False
    #: Whether the rows are a result of a call of the op alone. If not, no gradient of the rows arrives: the op passes
    #: rows forward, and its `forward` returns none.
    returns_rows: ClassVar[bool] = True
    #: Whether autocast casts the op's rows and parameters. If not, and autocast would cast the rows of its chain, the
    #: op is in a chain of its own.
    autocasts: ClassVar[bool] = True
    #: Whether no rule takes the op or its backward ops: those that rules would take with it are in another chain.
    alone: bool = False
    draws_random: bool = False  #: Whether `compute` draws random numbers from the default generators; see above
    #: The quantizer of the output. `compute` then also takes ``axes=`` and ``training=``, and returns one
    #: `QuantizedTensor` per axis.
    quantizes: Quantizer | None = None
    quantizes_weight: Quantizer | None = None  #: The quantizer of the weight of the linear layer that follows
    #: The format of a weight that the op stores quantized: the parameter ``weight`` has the codes, with the quantized
    #: axis last, and ``weight_scale_inv`` the scales. `compute` takes the `QuantizedTensor` in place of both. The
    #: weight is frozen. Recipes quantize the op's rows and gradients, see `fusedmoe.call.quantization.by_roles`.
    weight_format: Format | None = None
    weight_shape: tuple[int, ...] = ()  #: The shape of a linear layer's weight before quantization
    #: Whether `compute` of an op with ``quantizes`` also takes `fusedmoe.numerics.formats.packed.Packed` among
    #: ``axes``.
    packs: ClassVar[bool] = False
    #: The parts that the features of the input consist of: 2 for ``[gate | up]``; 1 for an activation of single
    #: features; 0 for an op whose input has no packed layout.
    parts: int = 0
    #: Whether the op only changes the format of values. The linear layer whose weight it quantizes may then follow
    #: after other ops of this kind.
    only_quantizes: ClassVar[bool] = False
    zeroes_tail: ClassVar[bool] = False  #: Whether the output has zeros in rows without an expert, for any input
    #: Whether the rows without an expert of an input change a result elsewhere than in the same rows, as those of a sum
    #: over all rows do. Otherwise they may be undefined.
    reads_tail: ClassVar[bool] = True
    changes_rows: ClassVar[bool] = False  #: Whether the output has other rows than the input (`Dispatch`, `Combine`)
    #: The values with rows of all ranks, if the op exchanges rows with them; it has an attribute ``expert_parallel``.
    #: Its gradients then have no derivatives.
    travels: ClassVar[tuple[str, ...]] = ()
    #: The formats of those that travel as codes and scales. All others travel in their own dtype.
    travels_as: Mapping[str, Format] = {}
    #: Approximate number of kernels that the plain-PyTorch path launches on a GPU, for the planner's cost.
    launches: ClassVar[int] = 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if defined_before(cls, "compute", "backward_ops"):
            cls.backward_ops = Op.backward_ops  # type: ignore[method-assign]  # the inherited ops fit another compute

    def compute(self, x: Tensor, *args: Any) -> Tensors:
        """Return the output, or ``(output, *provides)``. Takes rows, parameters and runtime inputs, in this order."""
        raise NotImplementedError(f"{type(self).__name__} defines no compute()")

    def infer(self, x: SpecLike, *args: Any) -> Specs:
        """Check the arguments of `compute`, given as tensors or specs, and return the specs of its results.

        The default is for ops that keep shape and dtype.

        Raises `InputError`: an argument is invalid; see `reject`.
        """
        return TensorSpec(tuple(x.shape), x.dtype)

    @property
    def stored_weight(self) -> tuple[str, ...]:
        """The parameters of a weight that is stored quantized, codes and scales; none without ``weight_format``."""
        return () if self.weight_format is None else ("weight", "weight_scale_inv")

    def backward_ops(self) -> tuple[BackwardOp, ...]:
        """Return the steps of this op's backward pass, in order.

        The gradient of ``input`` comes last, after those of parameters, so that gradients of neighbouring ops are
        adjacent and rules can match them together. The planner drops steps whose gradients are not required.
        """
        return (AutogradBackward(self),)

    def columns_again(self) -> BackwardOp | None:
        """Return the backward op that quantizes the rows of an op with ``quantizes`` again: it gives ``columns``, the
        output by columns. None if its result would differ from that of the forward pass.
        """
        return None

    def weight_quantization(self, layer: Op) -> Any:
        """Return the function that quantizes the weight of the linear layer that follows; see ``quantizes_weight``.

        It is a `fusedmoe.ops.quantize.WeightQuantization`.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no weight_quantization()")

    def host_sync(self, x: SpecLike, device: torch.device) -> bool:
        """Whether the plain-PyTorch path on this device reads a tensor on the host."""
        return False

    def path(self, operands: Sequence[SpecLike | None], device: torch.device) -> str:
        """Return, for ``explain()``, how the plain-PyTorch path multiplies quantized operands on this device.

        ``"native"``, ``"emulated"``, or ``""`` if no operand is quantized.
        """
        return ""

    def flops(self, rows: SpecLike) -> float:
        """Return the FLOPs of the op's products for input rows like these, for the estimate of ``explain()``."""
        return 0.0

    def attributes(self) -> tuple[Hashable, ...]:
        """Return the public attributes of the instance, which are part of a plan's key.

        A setting that changes the result must be public, so that its change gives a new plan.
        """
        state = self._of_process
        if state.attributes is None:
            public = {k: v for k, v in self.__dict__.items() if k[0] != "_"}
            for name, value in public.items():
                try:
                    hash(value)
                except TypeError:
                    expected = "a hashable value, as part of every plan's key: a tuple, or a name that starts with '_'"
                    raise self.reject(name, expected, type(value).__name__) from None
            state.attributes = tuple(public.items())
        return state.attributes

    def describe(self) -> str:
        """Return class and public attributes as a text, for graphs of `torch.compile`.

        Ops with equal texts compute the same results. After the first call, each change of an attribute updates the
        text.
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
        """Return the error for an invalid argument: ``raise self.reject("splits", "shape (4,)", splits.shape)``."""
        if isinstance(got, torch.Size):
            got = tuple(got)
        return InputError(f"{self!r}: {argument}: expected {expected}, got {got}")

    def check_floats(self, argument: str, dtype: torch.dtype) -> None:
        """Raise unless an argument has a floating-point dtype of 16 bits or more."""
        if FLOATS.kept(dtype) is WRONG:
            raise self.reject(argument, FLOATS.expected, dtype)

    def forward(self, x: Tensor, /, **inputs: Tensor) -> Any:
        """Run the op alone, with its runtime inputs by name.

        Returns the output, and for an op that provides values, these values by name.
        """
        return caller.run(self, x, inputs, None, self.provides)

    # The `forward` that does what `compute` does. An op whose class has another one is called as a module.
    forward_in_chain: ClassVar[Callable[..., Any]] = forward

    def values_from(self, x: Tensor, result: Any, names: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the rows and the provided values, from rows ``x`` and the result of `forward` for them.

        A `Sequential` calls this for an op that it calls as a module. ``names`` are the values that it reads.
        """
        rows, values = result
        return rows, values

    @property
    def amax_history(self) -> object:
        """The state of delayed scaling by role: ``op.amax_history.input.amax`` and ``.reference``."""
        return amax.by_role(self)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        amax.save(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        amax.load(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _note_change(op: Op, name: str) -> None:
    """Invalidate `attributes`, and so the plans, after a change; a changed parameter only clears the weight cache.

    FSDP2 sets each parameter twice per step, and a chain reads its parameters in every call.
    """
    if name in op._parameters:
        op._of_process.quantized_weight = None  # with FSDP2, a resharded weight must not hold this memory
        check_shard(op, name)
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
    others = op._modules or op._buffers.keys() - {*op.parameter_names}
    if kind.__module__.partition(".")[0] == "fusedmoe" and not others:
        return text
    # the results of other ops may also depend on further buffers, and on attributes whose repr is incomplete
    state = op._of_process
    if state.number is None:
        state.number = next(_numbers)
    return f"{text} of process {os.getpid()}, number {state.number}"


def defined_before(cls: type, name: str, other: str) -> bool:
    """Whether a class gets ``name`` from an earlier class in its MRO than ``other``."""
    first = next((c for c in cls.__mro__ if name in vars(c) or other in vars(c)), None)
    return first is not None and other not in vars(first)


class Node(recipes.Node):
    """An op and its name in the `Sequential` that runs it."""

    op: Op


class BackwardOp:
    """One step of an op's backward pass in plain PyTorch. Fusion rules with ``direction="backward"`` match it.

    - ``op`` (Op): the op whose gradient it computes.
    - ``gathers``, ``contracts``, ``quantizes``, ``packs``, ``zeroes_tail``, ``reads_tail``, ``travels``,
      ``travels_as``, ``launches``, ``alone``: as for `Op`; `gathers`, `travels` and `travels_as` by the op's names.
    """

    #: The values that `compute` takes, in order, by the op's names. A missing gradient is ``None``.
    needs: tuple[str, ...] = ("grad_output", "input")
    gives: tuple[str, ...] = ("grad_input",)  #: The values that `compute` returns, in order
    gathers: Mapping[str, tuple[str, str]] = {}
    contracts: ClassVar[Mapping[str, int]] = {}
    #: The gradients among `needs` that `compute` takes before they are quantized.
    unquantized: ClassVar[tuple[str, ...]] = ()
    quantizes: Quantizer | None = None
    packs: ClassVar[bool] = False
    #: Whether `compute` may return None for a gradient that is required, because it has stored it elsewhere. A fused
    #: step that covers only other backward ops must return tensors.
    may_give_none: ClassVar[bool] = False
    travels: tuple[str, ...] = ()
    travels_as: Mapping[str, Format] = {}
    zeroes_tail: ClassVar[bool] = False
    reads_tail: ClassVar[bool] = True
    launches: ClassVar[int] = 1

    def __init__(self, op: Op) -> None:
        self.op = op

    @property
    def alone(self) -> bool:
        return self.op.alone

    def infer(self, x: SpecLike, offsets: SpecLike | None) -> QuantizedSpec:
        """Return the spec of a quantized gradient by rows, for an op whose input is like x; see ``quantizes``."""
        raise NotImplementedError(f"{type(self).__name__} defines no infer()")

    def compute(self, *args: Any) -> Any:
        """Return the values of `gives` from those of `needs`."""
        raise NotImplementedError(f"{type(self).__name__} defines no compute()")

    def host_sync(self, x: SpecLike, device: torch.device) -> bool:
        """Whether this step reads a tensor on the host, for an op with the input ``x``; default: `Op.host_sync`."""
        return self.op.host_sync(x, device)

    def path(self, operands: Sequence[SpecLike | None], device: torch.device) -> str:
        """As `Op.path`, for the operands in `needs`."""
        return ""

    def flops(self, rows: SpecLike) -> float:
        """As `Op.flops`, for the first of `needs`."""
        return 0.0

    @property
    def added_bytes(self) -> int:
        """The bytes that the step moves besides `needs` and `gives`, for ``explain()``."""
        return 0

    def only(self, gives: tuple[str, ...]) -> BackwardOp:
        """Return a step that computes at least these of its `gives`; the default computes all."""
        return self

    def given(self, gradients: Collection[str]) -> BackwardOp:
        """Return the step for chains in which only these of the gradients in `needs` arrive; default: itself."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.op!r})"


class AutogradBackward(BackwardOp):
    """The gradient of an op without `backward_ops`: autograd recomputes and differentiates its ``compute``."""

    may_give_none = True  # for arguments that `compute` does not depend on

    def __init__(self, op: Op, gives: tuple[str, ...] | None = None) -> None:
        super().__init__(op)
        if op.provides_if_read or (op.passes_forward and op.provides):
            raise NotImplementedError(f"{type(op).__name__} defines no backward_ops()")
        self._arguments = ("input", *op.parameter_names, *op.runtime_inputs)
        self._outputs = ("output", *op.provides)
        states = random.NAMES if op.draws_random else ()
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
        again = torch.is_grad_enabled()  # for second derivatives
        source = _differentiable_source if again else _source
        with torch.enable_grad(), random.drawing_again(states, args[0].device):
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
    """Return the same values as a leaf, which requires a gradient if it is wanted."""
    return t.detach().requires_grad_(wanted)


def _differentiable_source(t: Tensor, wanted: bool) -> Tensor:
    """Return the same values in the same autograd graph, as a separate node if their gradient is wanted.

    Another argument may be computed from the same tensor.
    """
    if not wanted:
        return t
    return t.view_as(t) if t.requires_grad else _source(t, wanted)
