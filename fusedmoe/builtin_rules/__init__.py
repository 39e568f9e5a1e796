"""The built-in fusion rules: those that the modules below define. `import fusedmoe` registers `BUILTIN`.

A rule is for the architecture that its bases name. A rule that names none is for kernels without a matrix product. Both
Hopper and Blackwell compile these: `on` makes one rule for each, such as ``sm90.dispatch`` and ``sm100.dispatch``.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from fusedmoe.builtin_rules.exchange import arriving, arriving_codes, leaving
from fusedmoe.builtin_rules.products import dequantized, dgrad, dgrad_activation, gemm, gemm_activation, linear, wgrad
from fusedmoe.builtin_rules.requirements import OnSm90, OnSm100, on
from fusedmoe.builtin_rules.rows import activation, column_sums, dispatch, offsets, quantize, router, transposed_weight
from fusedmoe.builtin_rules.sm100 import dgrad_activation_quantize, gemm_activation_quantize, gemm_combine, grouped_mm
from fusedmoe.builtin_rules.sm100 import gemm as packed_gemm
from fusedmoe.builtin_rules.sm100 import quantize as packed_quantize
from fusedmoe.builtin_rules.sm100 import wgrad as packed_wgrad
from fusedmoe.fusion.language.rule import FusionRule

_MODULES = (
    gemm, gemm_activation, dgrad, dgrad_activation, wgrad, dequantized, linear,
    activation, column_sums, dispatch, offsets, quantize, router, transposed_weight,
    arriving, arriving_codes, leaving,
    packed_gemm, gemm_activation_quantize, gemm_combine, dgrad_activation_quantize, packed_wgrad, packed_quantize,
    grouped_mm,
)  # fmt: skip


def _rules_of(module: ModuleType) -> Iterator[type[FusionRule]]:
    """Yield the rules that a module defines, except those that are only bases: their names begin with ``_``."""
    for name, rule in vars(module).items():
        defined = isinstance(rule, type) and issubclass(rule, FusionRule) and rule.__module__ == module.__name__
        if defined and not name.startswith("_"):
            yield rule


_RULES = [rule for module in _MODULES for rule in _rules_of(module)]
ROWS = tuple(rule for rule in _RULES if not issubclass(rule, (OnSm90, OnSm100)))  # the rules that name no architecture
BUILTIN = (*(rule for rule in _RULES if rule not in ROWS), *on(OnSm90, *ROWS), *on(OnSm100, *ROWS))
