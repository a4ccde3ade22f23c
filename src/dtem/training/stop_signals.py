"""SIGINT (Ctrl-C) and SIGTERM during training: they wait for the end of an update, so that it can be saved."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

from dtem.errors import DtemError

REPEAT_SECONDS = 1.0
"""A second Ctrl-C counts after this time: launchers pass on the one that the terminal has sent to all processes."""


class StopSignals:
    """A context in which SIGINT and SIGTERM raise KeyboardInterrupt: at once or, while `deferred`, not by themselves.

    Whoever sets `deferred` looks at `received` and stops. Ctrl-C a second time always raises. At the end the handlers
    from before are back and get the signal, so a program ends as it would without this context. Outside of the main
    thread, which alone gets signals, nothing happens.
    """

    def __init__(self) -> None:
        self.received = 0
        """Number of the first signal; 0: none."""
        self.deferred = False
        self._since = 0.0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if handler not in (None, signal.SIG_IGN):  # ignored as under nohup, or not from Python
                with contextlib.suppress(ValueError):  # not the main thread
                    signal.signal(number, self._handle)
                    self._handlers[number] = handler
        return self

    def __exit__(self, kind: object, value: BaseException | None, trace: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if not self.received or isinstance(value, DtemError):
            return
        notes = getattr(value, "__notes__", [])
        if self._handlers[self.received] is signal.SIG_DFL:  # the process ends without another word
            print(*notes, sep="\n", file=sys.stderr, flush=True)
        try:
            signal.raise_signal(self.received)
        except BaseException as stop:
            for note in notes:
                stop.add_note(note)
            raise stop from None

    @contextlib.contextmanager
    def immediate(self) -> Iterator[None]:
        """Signals raise at once here, also one that came before."""
        deferred, self.deferred = self.deferred, False
        try:
            if self.received:
                raise KeyboardInterrupt
            yield
        finally:
            self.deferred = deferred

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.received and number == signal.SIGINT and time.monotonic() - self._since > REPEAT_SECONDS
        if not self.received:
            self.received, self._since = number, time.monotonic()
            if self.deferred and number == signal.SIGINT:
                print("\nstopping after this update; Ctrl-C again stops at once", file=sys.stderr, flush=True)
        if again or not self.deferred:
            raise KeyboardInterrupt
