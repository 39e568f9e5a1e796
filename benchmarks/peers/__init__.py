"""Who takes part, one file a peer; see `benchmarks.cases.Peer` for what a peer is.

Every import of a peer's package is inside its methods, so that a run goes on without it.
"""

from __future__ import annotations
