"""`Sequential`: ops and other modules in a row, run by the fewest kernels that there are for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from fusedmoe.fusion.plan import Explanation
from fusedmoe.layout import ChainPart, Layout

if TYPE_CHECKING:
    from torch import Tensor


class Sequential(nn.Sequential):
    """``torch.nn.Sequential`` whose ops are fused where there is a kernel for them, with the same results.

    Built, indexed, sliced, saved and copied like ``torch.nn.Sequential``. Besides, ops take runtime inputs by name:
    each is given once, to ``forward``, for whichever ops use it, unless an earlier op provides it.

    Any other ``nn.Module`` may stand among the ops; it is called with the rows alone, and splits the chain there. So
    does an op with module hooks, or one whose ``forward`` was replaced: it is called as a module, so that the hooks
    run. A nested `Sequential` counts as its ops.

    Examples
    --------
    >>> experts = Sequential(GroupedLinear(8, 64, 2 * 32), SwiGLU(), GroupedLinear(8, 32, 64))
    >>> y = experts(x, splits=tokens_per_expert)
    """

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
        layout = self._current_layout()
        named = layout.bind(x, inputs)
        for part in layout.parts:
            x = part.run(x, named)
        return x

    def explain(self, x: Tensor, /, **inputs: Tensor) -> Explanation:
        """Return what `forward` would do with this call, and why: ``print`` it for a table.

        The backward pass is planned as autograd would want it here: nothing under ``torch.no_grad()``. Chains and
        modules in front of another chain are run, to know what it gets.
        """
        layout = self._current_layout()
        named = layout.bind(x, inputs)
        explained = []
        for i, part in enumerate(layout.parts):
            explained.append((part.title, part.chain.explain(x, named) if isinstance(part, ChainPart) else None))
            if i + 1 < len(layout.parts):
                x = part.run(x, named)
        return Explanation(tuple(explained))

    @property
    def runtime_inputs(self) -> tuple[str, ...]:
        """The runtime inputs that `forward` takes, in order of first use."""
        return tuple(self._current_layout().wanted)

    def _current_layout(self) -> Layout:
        layout: Layout | None = self.__dict__.get("_layout")
        if layout is None or not layout.holds():
            layout = self.__dict__["_layout"] = Layout(self, opened=lambda module: type(module) is Sequential)
        return layout

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_layout"}
