"""The measured shapes (`shapes.toml`), and the distribution of their rows over the experts.

Axes: T tokens, H hidden, I intermediate, E experts, K chosen experts per token, R = T K dispatched rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fusedmoe.numerics.activations import Activation

FILE = Path(__file__).with_name("shapes.toml")
QUICK = ("qwen3-30b-a3b", "gpt-oss-20b", "sonic-7b-n256")
ROUTINGS = ("uniform", "zipf", "half", "empty")
ALIGNED_ROWS = 128  # some peers require groups of a multiple of this number of rows

_ACTIVATIONS = {
    "swiglu": Activation("swiglu"),
    "clamped_swiglu": Activation("swiglu", limit=7.0, alpha=1.702, offset=1.0),  # GPT-OSS
}


@dataclass(frozen=True)
class Shape:
    """One model's routed experts; the fields are those of `shapes.toml`."""

    name: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    activation: str = "swiglu"

    @property
    def rows(self) -> int:
        """R."""
        return self.tokens * self.top_k

    @property
    def glu(self) -> Activation:
        """The activation between the two layers."""
        return _ACTIVATIONS[self.activation]

    @property
    def biases(self) -> bool:
        """Whether the layers have biases, as GPT-OSS's do."""
        return self.activation == "clamped_swiglu"

    def forward_flops(self, rows: int | None = None) -> float:
        """``6 R H I``: ``2 R H I`` for each of gate, up and down. A backward pass has twice as many."""
        return 6.0 * (self.rows if rows is None else rows) * self.hidden * self.intermediate


def load(path: Path = FILE) -> dict[str, Shape]:
    """Read the shapes, by name."""
    try:
        import tomllib
    except ModuleNotFoundError as error:
        raise RuntimeError("benchmarks/shapes.toml is read with tomllib, which needs Python 3.11 or newer") from error
    tables = tomllib.loads(path.read_text(encoding="utf-8"))["shape"]
    return {table["name"]: Shape(**table) for table in tables}


def splits(rows: int, experts: int, routing: str, seed: int = 0) -> Tensor:
    """Return random rows per expert, (E,) int64 on the CPU, which sum to ``rows``.

    Parameters
    ----------
    routing
        Distribution of the rows. ``"uniform"``: all experts are equally likely. ``"zipf"``: the n-th most popular
        expert has weight 1/n, in random order. ``"half"``: one expert gets half of the rows. ``"empty"``: a quarter of
        the experts, at least one, get none.
    """
    draw = torch.Generator().manual_seed(seed)
    weight = torch.ones(experts, dtype=torch.float64)
    order = torch.randperm(experts, generator=draw)
    if routing == "zipf":
        weight[order] = 1 / torch.arange(1, experts + 1, dtype=torch.float64)
    elif routing == "half":
        weight[order[0]] = max(experts - 1, 1)
    elif routing == "empty":
        weight[order[: max(1, experts // 4)]] = 0 if experts > 1 else 1
    elif routing != "uniform":
        raise ValueError(f"splits: routing: expected one of {', '.join(ROUTINGS)}, got {routing!r}")
    expert_R = torch.multinomial(weight, rows, replacement=True, generator=draw)
    return expert_R.bincount(minlength=experts)


def aligned_splits(rows: int, experts: int) -> Tensor:
    """Return equal groups of a multiple of 128 rows, at most ``rows`` in total; zeros if ``rows`` are too few."""
    return torch.full((experts,), rows // experts // ALIGNED_ROWS * ALIGNED_ROWS)
