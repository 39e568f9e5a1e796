"""``python -m fusedmoe`` is ``fusedmoe``."""

import sys

from fusedmoe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
