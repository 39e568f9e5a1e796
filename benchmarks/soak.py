"""``make soak``: `fusedmoe verify --soak`, with the outcome of all kernels in the result files."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from benchmarks import results
from fusedmoe.commands.main import main

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "soak.json"
        status = main(["verify", "--soak", "--json", str(file), *sys.argv[1:]])
        found = json.loads(file.read_text()) if file.exists() else {"only": ""}
    if found["only"] is None and "--calls" not in sys.argv:
        print(results.write(results.ROOT / "results", "soak", found))
    sys.exit(status)
