"""How to install what an extra of fusedmoe brings."""

from __future__ import annotations


def install_command(extra: str) -> str:
    """Return the command that adds an extra to an installation of fusedmoe.

    pip takes the extra's requirements from the installed fusedmoe, whether that came from a checkout or an index. The
    second form is for a checkout that is used without being installed.
    """
    return f"pip install 'fusedmoe[{extra}]' (in a checkout: pip install '.[{extra}]')"
