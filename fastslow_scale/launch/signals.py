"""Signals to a rank: before training starts there is nothing to save; afterwards all ranks stop at the same step.

Exit status 75 (EX_TEMPFAIL of sysexits.h) means "start me again": the same command goes on where this one stopped.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

EXIT_INTERRUPTED = 130
EXIT_START_AGAIN = 75

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""What clusters send before they take a node away, and Ctrl-C."""

THE_SAME_COMMAND = "the same command goes on from here"


def goes_on(resume: str) -> str:
    """How to go on after exit status 75, for a command that was given this --resume."""
    return THE_SAME_COMMAND if resume == "auto" else "the same command with --resume auto goes on from here"


def start_again_on_signal() -> None:
    """While a rank starts up, a stop signal ends it at once."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: os._exit(EXIT_START_AGAIN))


class StopSignals:
    """From its creation on, a stop signal is noted in `received`; a second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.received = 0
        self._interrupts = 0
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            os._exit(EXIT_INTERRUPTED)
        self.received = self.received or number
