"""Signals that ask a run to save and leave."""

import signal
import threading
import types
from collections.abc import Callable

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """While entered, notes SIGTERM and SIGINT instead of ending the process.

    A signal that is ignored stays so.  A second SIGINT interrupts at once.  Outside the main
    thread, where Python allows no handlers, it notes nothing.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """Of the first signal that came; None while none has."""
        self._before: dict[int, Callable[..., object] | int | None] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        if number == signal.SIGINT and self.number is not None:
            raise KeyboardInterrupt
        self.number = self.number or number
