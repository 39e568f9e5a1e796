"""``fusedmoe demo``: train a small model, or compare recipes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fusedmoe.commands.demo.errors import DemoError
from fusedmoe.commands.demo.options import add_arguments, split_namespace

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def run(options: argparse.Namespace) -> int:
    """Train, and return the exit status."""
    try:
        given, call = split_namespace(options)
        if call.compare is not None:
            from fusedmoe.commands.demo.compare import (  # for cost: wrong options are refused without this import
                compare,
            )

            return compare(given, call)
        from fusedmoe.commands.demo.run import run  # for cost, as above

        return run(given, call)
    except DemoError as error:
        sys.stdout.flush()
        print(f"fusedmoe demo: error: {error}", file=sys.stderr)
        return error.exit_code
