"""Ctrl-C that waits for the end of the step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class StopSignals:
    """A context in which the first Ctrl-C or SIGTERM sets :attr:`requested`, and a second raises ``KeyboardInterrupt``.

    It has no effect outside the main thread, which alone receives signals.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._earlier: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._earlier[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            raise KeyboardInterrupt
        self.requested = number
