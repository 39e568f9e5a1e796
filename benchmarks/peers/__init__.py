"""The peers, one file per peer; see `benchmarks.cases.Peer`."""

from __future__ import annotations
