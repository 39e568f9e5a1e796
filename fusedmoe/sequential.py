"""`Sequential`: ops and other modules in a row, run by the fewest kernels that there are for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from torch import nn

from fusedmoe import modes
from fusedmoe.checks import integer, one_of
from fusedmoe.fusion.plan import Explanation
from fusedmoe.kernels.options import DEFAULT, KernelOptions, Schedule
from fusedmoe.ops.amax_state import only_looking
from fusedmoe.ops.op import Op, Runnable
from fusedmoe.partition import ChainPart, buffers_kept, partition_for
from fusedmoe.shapes import explain_shapes
from fusedmoe.target import planned_for

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeGuard

    from torch import Tensor

_SMS = integer("a number of SMs, 0 or more", 0)
_SCHEDULE = one_of(get_args(Schedule))


def kernel_options(who: str, sm_margin: object, schedule: Schedule) -> KernelOptions:
    """Return the options, checked; ``who`` was given them."""
    return KernelOptions(_SMS(f"{who}: sm_margin", sm_margin), _SCHEDULE(f"{who}: schedule", schedule))


class Sequential(Runnable, nn.Sequential):
    """``torch.nn.Sequential`` whose ops are fused where there is a kernel for them, with the same results.

    Built, indexed, sliced, saved and copied like ``torch.nn.Sequential``. Besides, ops take runtime inputs by name:
    each is given once, to ``forward``, for whichever ops use it, unless an earlier op provides it.

    Any other ``nn.Module`` may stand among the ops; it is called with the rows alone, and splits the chain there. So
    does an op with module hooks, or one whose ``forward`` was replaced: it is called as a module, so that the hooks
    run. A nested `Sequential` counts as its ops.

    Parameters
    ----------
    *args
        The modules, or one ``OrderedDict`` of them, as for ``torch.nn.Sequential``.
    sm_margin
        SMs that the fused kernels leave free for other kernels, such as those of communication.
    schedule
        ``"static"``: a thread block of a fused kernel knows its tiles beforehand. ``"dynamic"``: it draws the next one
        from a counter, which evens out what other kernels on the GPU slow down.

    Notes
    -----
    ``sm_margin`` and ``schedule`` may be set as attributes at any time; neither changes a result. They hold for every
    chain that this `Sequential` runs, in its forward and the backward of that, also for the ops of a nested one, whose
    own settings hold where it is called by itself.

    Examples
    --------
    >>> experts = Sequential(GroupedLinear(8, 64, 2 * 32), SwiGLU(), GroupedLinear(8, 32, 64))
    >>> y = experts(x, splits=tokens_per_expert)
    """

    def __init__(self, *args: Any, sm_margin: int = 0, schedule: Schedule = "static") -> None:
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
        """How the fused kernels share out their tiles: ``"static"`` or ``"dynamic"``."""
        return self._options.schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self._options = kernel_options(type(self).__name__, self.sm_margin, schedule)

    def __getitem__(self, idx: int | slice) -> Any:
        found: Any = super().__getitem__(idx)
        if isinstance(idx, slice):
            found._options = self._options
        return found

    def extra_repr(self) -> str:
        """Return the options that are not the default, as `torch.nn.Module` prints settings."""
        changed = {name: getattr(self, name) for name in ("sm_margin", "schedule")}
        return ", ".join(f"{name}={value!r}" for name, value in changed.items() if value != getattr(DEFAULT, name))

    def forward(self, x: Tensor, /, **inputs: Tensor) -> Tensor:  # type: ignore[override]
        """Run the ops.

        Parameters
        ----------
        x
            The rows, (R, features).
        **inputs
            The runtime inputs, by name: ``splits``, ``probs``, ...

        Raises
        ------
        InputError
            A runtime input is missing, is used by no op, or has the wrong shape, dtype or device.
        """
        return modes.run(self, x, inputs)

    if TYPE_CHECKING:  # of nn.Module, a type checker knows that a call returns Any
        __call__ = forward

    def forward_with(self, parameters: Mapping[str, Tensor | None], x: Tensor, /, **inputs: Tensor) -> Tensor:
        """Run the ops with parameters that belong to somebody else: ``{"0.weight": w, "0.bias": None, ...}``.

        For a module that holds weights of its own and composes ops without any; see `without_parameters`. (What
        ``torch.func.functional_call`` does for a module with parameters works too, but takes the host longer.) Any
        strides will do: ``weight.mT`` of a weight that is stored (E, in, out).

        Raises
        ------
        InputError
            As `forward`; or a parameter is given that no op takes or that the op has itself, or is missing.
        """
        return modes.run(self, x, inputs, parameters)

    def without_parameters(self) -> Sequential:
        """Take the parameters from the ops, for `forward_with`; return this `Sequential`.

        Build it with ``device="meta"``, and no memory is taken for them.
        """
        for module in self.modules():
            if isinstance(module, Op):
                for name in module.parameter_names:
                    setattr(module, name, None)
        return self

    def explain(self, x: Tensor, /, *, arch: Any = None, **inputs: Tensor) -> Explanation:
        """Return what `forward` would do with this call, and why: ``print`` it for a table.

        The backward pass is planned as autograd would want it here: nothing under ``torch.no_grad()``. Chains and
        modules in front of another chain are run, to know what it gets. For delayed scaling that is no step, and the
        buffers of these modules stay as they were.

        Parameters
        ----------
        x, **inputs
            As for `forward`.
        arch
            Plan for an NVIDIA GPU of this architecture, 90 or "sm_90", in place of x's device. No GPU need be
            there. No chain runs; modules in front of another chain are called on tensors without memory. x and the
            inputs may be on the meta device.

        Raises
        ------
        InputError
            As `forward`; or ``arch`` is no architecture.
        """
        return self.explain_with(None, x, arch=arch, **inputs)

    def explain_with(
        self, parameters: Mapping[str, Tensor | None] | None, x: Tensor, /, *, arch: Any = None, **inputs: Tensor
    ) -> Explanation:
        """Return what `forward_with` would do with this call, and why; see `explain`."""
        partition, named = partition_for(self, inputs), inputs
        partition.check_inputs(x, named)
        if parameters is not None:
            partition.check_parameters(parameters)
        with only_looking(), buffers_kept(partition.parts), planned_for(arch) as asked:
            if asked is not None and len(partition.parts) > 1:
                return Explanation(explain_shapes(partition.parts, x, named, self._options, parameters))
            explained = []
            counted = True
            for i, part in enumerate(partition.parts):
                chain = part.chain_for(counted) if isinstance(part, ChainPart) else None
                plan = None if chain is None else chain.explain(x, named, self._options, parameters)
                explained.append((part.title, plan))
                if i + 1 < len(partition.parts):
                    x, counted = part.run(x, named, self._options, parameters, counted)
        return Explanation(tuple(explained))

    @property
    def changes_rows(self) -> bool:
        """Whether the rows that come out are not those that went in: a module among these says so."""
        return partition_for(self).changes_rows

    @property
    def runtime_inputs(self) -> tuple[str, ...]:
        """The runtime inputs that `forward` takes, in order of first use."""
        return tuple(partition_for(self).wanted)

    @property
    def optional_inputs(self) -> tuple[str, ...]:
        """``("offsets",)`` where `forward` may be given ``splits``, though no op has to have them; see `Linear`."""
        return ("offsets",) if partition_for(self).may_be_sorted else ()

    def _is_called(self, name: str) -> None:
        """Let log lines of new plans call this by its name in a model."""
        self._of_process.place = name
        partition_for(self).name(name)

    @staticmethod
    def _opens(module: object) -> TypeGuard[Sequential]:
        """Whether a nested module counts as its own modules: a `Sequential` with the ``forward`` of this class."""
        return isinstance(module, Sequential) and type(module).forward is Sequential.forward
