"""The command that installs an extra of fusedmoe."""

from __future__ import annotations


def install_command(extra: str) -> str:
    """Return the commands that install an extra: for an installed package, and for a checkout."""
    return f"pip install 'fusedmoe[{extra}]' (in a checkout: pip install '.[{extra}]')"
