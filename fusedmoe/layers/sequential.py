"""`Sequential`: a sequence of ops and other modules that runs as fused kernels."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeGuard, get_args

from torch import Tensor, nn

from fusedmoe.base.checks import integer, one_of
from fusedmoe.base.target import planned_for
from fusedmoe.call import modes
from fusedmoe.call.explain_parts import explain_parts
from fusedmoe.call.partition import buffers_kept, partition_for, partition_of_call
from fusedmoe.fusion.report.data import Explanation
from fusedmoe.kernels.options import DEFAULT, KernelOptions, Schedule
from fusedmoe.ops.op import Op, Runnable
from fusedmoe.ops.state.amax import only_looking
from fusedmoe.ops.state.random import drawing_nothing

_SMS = integer("a number of SMs, 0 or more", 0)
_TIMES = integer("a number of repetitions, 1 or more", 1)
_SCHEDULE = one_of(get_args(Schedule))


def kernel_options(who: str, sm_margin: object, schedule: Schedule) -> KernelOptions:
    """Return the options, checked; ``who`` was given them."""
    return KernelOptions(_SMS(f"{who}: sm_margin", sm_margin), _SCHEDULE(f"{who}: schedule", schedule))


class Sequential(Runnable, nn.Sequential):
    """``torch.nn.Sequential`` that fuses its ops if a kernel exists for them, with the same results.

    It is built, indexed, sliced, saved and copied like ``torch.nn.Sequential``. Its ops may take runtime inputs by
    name. ``forward`` takes each input once, for all ops that use it, unless an earlier op provides it.

    - Any other ``nn.Module`` among the ops splits the chain. It is called with the rows alone.
    - An op with module hooks, or with a replaced ``forward``, also splits the chain. It is called as a module.
    - A nested `Sequential` is replaced by its ops.

    ``sm_margin`` and ``schedule`` may be set as attributes at any time; neither changes a result. They apply to the
    forward and the backward pass of this `Sequential` and of nested ones. The options of a nested `Sequential` apply
    only when it is called by itself.

    Parameters
    ----------
    *args
        The modules, or one ``OrderedDict`` of them, as for ``torch.nn.Sequential``.
    sm_margin
        SMs that the fused kernels leave free for other kernels, such as communication.
    schedule
        ``"dynamic"``: each cluster of thread blocks of a fused kernel takes its next tile from a counter, which
        balances the load. ``"static"``: the tiles of a cluster are fixed at the start.

    Examples
    --------
    >>> experts = Sequential(GroupedLinear(8, 64, 2 * 32), SwiGLU(), GroupedLinear(8, 32, 64))
    >>> y = experts(x, splits=tokens_per_expert)
    """

    def __init__(self, *args: Any, sm_margin: int = 0, schedule: Schedule = "dynamic") -> None:
        super().__init__(*args)
        self._options = kernel_options(type(self).__name__, sm_margin, schedule)

    @property
    def sm_margin(self) -> int:
        """SMs that the fused kernels leave free."""
        return self._options.sm_margin

    @sm_margin.setter
    def sm_margin(self, sm_margin: int) -> None:
        self._options = kernel_options(type(self).__name__, sm_margin, self.schedule)

    @property
    def schedule(self) -> Schedule:
        """How the fused kernels assign their tiles: ``"dynamic"`` or ``"static"``."""
        return self._options.schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self._options = kernel_options(type(self).__name__, self.sm_margin, schedule)

    def __getitem__(self, idx: int | slice) -> Any:
        found: Any = super().__getitem__(idx)
        if isinstance(idx, slice):
            found._options = self._options
        return found

    def __add__(self, other: Any) -> Sequential:
        """Return a `Sequential` of the modules of both, with the options of this one; as in torch, without names."""
        return self._of([*self, *other]) if isinstance(other, nn.Sequential) else NotImplemented

    def __radd__(self, other: Any) -> Sequential:
        """Return a `Sequential` of the modules of a ``torch.nn.Sequential`` and of this one."""
        return self._of([*other, *self]) if isinstance(other, nn.Sequential) else NotImplemented

    def __mul__(self, other: int) -> Sequential:
        """Return a `Sequential` that runs the same modules several times, which share their parameters."""
        times = _TIMES(f"{type(self).__name__}: times", other)
        return self._of([*self] * times)

    __rmul__ = __mul__

    def _of(self, modules: list[nn.Module]) -> Sequential:
        made = Sequential(*modules)
        made._options = self._options
        return made

    def extra_repr(self) -> str:
        """Return the options that are not the default, as `torch.nn.Module` prints settings."""
        changed = {name: getattr(self, name) for name in ("sm_margin", "schedule")}
        return ", ".join(f"{name}={value!r}" for name, value in changed.items() if value != getattr(DEFAULT, name))

    def forward(self, x: Tensor, /, **inputs: Tensor) -> Tensor:  # type: ignore[override]
        """Run the ops.

        Raises `InputError`: a runtime input is missing, is used by no op, or has the wrong shape, dtype or device.

        Parameters
        ----------
        x
            The rows, (R, features).
        **inputs
            The runtime inputs, by name: ``splits``, ``probs``, ...
        """
        return modes.run(self, x, inputs)  # type: ignore[no-any-return]

    if TYPE_CHECKING:  # a call of nn.Module returns Any to a type checker
        __call__ = forward

    def forward_with(self, parameters: Mapping[str, Tensor | None], x: Tensor, /, **inputs: Tensor) -> Tensor:
        """Run the ops with the parameters of another module: ``{"0.weight": w, "0.bias": None, ...}``.

        The ops must have no parameters of their own; see `without_parameters`. (``torch.func.functional_call`` replaces
        existing parameters, but takes the host longer.) Weights may have any strides, such as ``weight.mT`` of a weight
        (E, in, out); see `GroupedLinear.transposed_grad`.

        Raises `InputError`: as for `forward`; or a parameter is missing, no op takes it, or the op has its own.
        """
        return modes.run(self, x, inputs, parameters)  # type: ignore[no-any-return]

    def without_parameters(self) -> Sequential:
        """Remove the parameters of the ops, for `forward_with`; return this `Sequential`.

        A `Sequential` that is built with ``device="meta"`` takes no memory for them.
        """
        for module in self.modules():
            if isinstance(module, Op):
                for name in module.parameter_names:
                    setattr(module, name, None)
        return self

    def explain(self, x: Tensor, /, *, arch: Any = None, **inputs: Tensor) -> Explanation:
        """Return the plans of this call of `forward`, with reasons; ``print`` them as a table.

        A backward pass is planned if autograd would run one, so not under ``torch.no_grad()``. Every part except the
        last is run, since the next part depends on its result. Buffers, amax histories and the states of random number
        generators stay unchanged.

        Raises `InputError`: as for `forward`; or ``arch`` is no architecture.

        Parameters
        ----------
        x, **inputs
            As for `forward`.
        arch
            Plan for an NVIDIA GPU of this architecture, 90 or "sm_90"; the machine needs no GPU. No chain runs, and
            modules are called on tensors without memory. x and the inputs may be on the meta device.
        """
        return self.explain_with(None, x, arch=arch, **inputs)

    def explain_with(
        self, parameters: Mapping[str, Tensor | None] | None, x: Tensor, /, *, arch: Any = None, **inputs: Tensor
    ) -> Explanation:
        """Return the plans of this call of `forward_with`; see `explain`."""
        return explain_call(self, parameters, x, inputs, arch)

    @property
    def changes_rows(self) -> bool:
        """Whether one of the modules declares that its output has other rows than its input."""
        return partition_for(self).changes_rows

    @property
    def runtime_inputs(self) -> tuple[str, ...]:
        """The runtime inputs that `forward` takes, in order of first use."""
        return tuple(partition_for(self).wanted)

    @property
    def optional_inputs(self) -> tuple[str, ...]:
        """``("offsets",)`` if `forward` accepts ``splits`` but no op requires them; see `Linear`."""
        return ("offsets",) if partition_for(self).may_be_sorted else ()

    def _is_called(self, name: str) -> None:
        """Set the name in a model, for the log lines of new plans."""
        self._of_process.place = name
        partition_for(self).name(name)

    @staticmethod
    def _opens(module: object) -> TypeGuard[Sequential]:
        """Whether a nested module is replaced by its modules: a `Sequential` with the ``forward`` of this class."""
        return isinstance(module, Sequential) and type(module).forward is Sequential.forward


def explain_call(
    root: Runnable, parameters: Mapping[str, Tensor | None] | None, x: Tensor, inputs: dict[str, Tensor], arch: Any,
    provides: tuple[str, ...] = (),
) -> Explanation:  # fmt: skip
    """Return the plans of a call of a module, which also returns these provided values; see `Sequential.explain`."""
    partition = partition_of_call(root, x, inputs, parameters, provides)
    with only_looking(), buffers_kept(partition.parts), planned_for(arch) as asked:
        run = asked is None or len(partition.parts) == 1
        with drawing_nothing(x) if run and len(partition.parts) > 1 else nullcontext():
            return Explanation(explain_parts(partition.parts, x, inputs, root._options, parameters, run=run))
