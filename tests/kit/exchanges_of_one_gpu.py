"""The exchanges of expert parallelism between two regions of one device, and the products beside them, of few rows.

``python -m kit.exchanges_of_one_gpu`` runs them, or those that it gets as arguments, on the GPU, for a tool that
watches the process.
"""

import sys
from dataclasses import replace

import torch

from benchmarks.soak.direct import DIRECT

EXCHANGES = (
    "gather", "gather of 32-bit ids", "gather by experts", "gather by blocks of experts", "gather of codes",
    "gather of codes alone", "codes in the order of experts", "return", "return without values", "return of rows",
    "return of rows without values",
)  # fmt: skip
"""Names of `benchmarks.soak.direct.DIRECT`."""
PRODUCTS = (
    "return beside a product", "return beside a product, by experts", "return beside an FP8 product",
    "product of ranges", "FP8 product of ranges", "activation of ranges", "activation of ranges, by experts",
    "FP8 activation of ranges", "derivative of ranges", "FP8 derivative of ranges", "weight gradient beside a sum",
    "FP8 weight gradient beside a sum",
)  # fmt: skip
"""The same of products that follow rows, whose rows leave, or that run beside an exchange."""


def results_of(name, device, rows=256):
    """The results of a name, which have the bits of other kernels: else a ValueError."""
    found = next(subject for subject in DIRECT if subject.name == name)
    chosen = 8 if name == "return" else 4  # `Total` loads four rows of a token at once
    made = replace(found, experts=chosen, top_k=chosen, rows=rows, hidden=64, intermediate=128).make(device)
    return made.results(made.call("zipf", "dynamic"))


if __name__ == "__main__":
    for name in sys.argv[1:] or (*EXCHANGES, *PRODUCTS):
        results_of(name, torch.device("cuda"), rows=4096)
        torch.cuda.synchronize()
        sys.stdout.write(f"{name}\n")
