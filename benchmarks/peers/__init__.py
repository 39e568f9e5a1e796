"""The peers, one file per peer; see `benchmarks.cases.Peer`.

Their methods import their packages, which may be missing.
"""

from __future__ import annotations
