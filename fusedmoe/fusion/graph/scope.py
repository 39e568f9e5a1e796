"""The meaning of bare names along a chain: runtime inputs, values that ops provide, and values derived from either."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from fusedmoe.fusion.graph.places import Place, glue_place
from fusedmoe.ops.derived import CHECKED, DERIVED, OFFSETS, PACKED, Derived
from fusedmoe.ops.glue import derive


class Scope:
    """The values in scope at a position of the chain, which moves from the first op to the last.

    A bare name means the value of the latest op that provides it, else the caller's runtime input. Rows change at ops
    such as `Dispatch` and `Combine`. Each set of rows has a number, from 0, and may be sorted by expert.

    Arguments:
    - ``inputs``: the first runtime inputs. `take` appends further ones to the attribute ``inputs``.
    - ``provided``: the runtime inputs that ops before the chain provide: their contents need no check.

    Its attributes:
    - ``derived`` (dict of str to Place): the glue of each derived value.
    - ``rows`` (int): the current set of rows.
    """

    def __init__(self, inputs: Iterable[str], provided: Collection[str]) -> None:
        self.inputs = list(inputs)
        self.derived: dict[str, Place] = {}
        self.rows = 0
        self._provided = frozenset(provided)
        self._values = {name: name for name in self.inputs}
        self._of_ops: set[str] = set()  # all values that ops of the chain provide
        self._rows_of: dict[str, int] = {}
        self._offsets_of: dict[int, str] = {}  # by the set of rows

    def take(self, name: str) -> str:
        """Return the value that a name means here; a new name is a runtime input of the caller."""
        if name not in self._values:
            self._values[name] = name
            self.inputs.append(name)
        return self._values[name]

    def provide(self, values: Mapping[str, str]) -> None:
        """Bring the values that an op provides into scope, by name."""
        self._values |= values
        self._of_ops.update(values.values())

    def provided_with(self, name: str, other: str) -> str | None:
        """Return the value of a name where an op provided ``other``; None if that op did not provide both."""
        value = self._values.get(other, other).removesuffix(other) + name
        return value if value in self._of_ops else None

    def derive(self, name: str, rows_value: str, taker: str) -> str:
        """Return a derived value for these rows. An error in its source names the op ``taker``."""
        return self._derived(DERIVED[name], rows_value, taker)

    def derive_packed(self, rows_value: str, taker: str) -> dict[str, str]:
        """Return the derived values of the packed layout of these rows, by name."""
        return {derived.name: self._derived(derived, rows_value, taker) for derived in PACKED}

    def source(self, name: str) -> str:
        """Return the value that the derived value of a name is computed from."""
        return self._values[DERIVED[name].source]

    def checked(self, name: str, rows_value: str, taker: str) -> str | None:
        """Return the checked form of a runtime input that indexes rows; None for any other value."""
        of_caller = name not in self._provided and self._values.get(name, name) == name
        return self._derived(CHECKED[name], rows_value, taker) if name in CHECKED and of_caller else None

    def _derived(self, derived: Derived, rows_value: str, taker: str) -> str:
        source = self.take(derived.source)
        value = source.removesuffix(derived.source) + derived.name
        if value not in self.derived:
            names = {derived.source: source, "rows": rows_value, derived.name: value}
            self.derived[value] = glue_place(derive(derived, taker), value, names)
            if derived is OFFSETS:
                self._offsets_of.setdefault(self.rows, value)
        return value

    def has_rows(self, value: str) -> None:
        """Record that a value has one entry per row of the current set."""
        self._rows_of.setdefault(value, self.rows)

    def offsets(self, value: str) -> str | None:
        """Return the offsets of the experts' rows in a value; None for a value without such rows."""
        rows = self._rows_of.get(value)
        return None if rows is None else self._offsets_of.get(rows)
