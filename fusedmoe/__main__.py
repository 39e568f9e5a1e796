"""``python -m fusedmoe`` is ``fusedmoe``."""

import sys

from fusedmoe.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
