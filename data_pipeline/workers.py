"""What every process that helps another one must do: end when that one ends, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from multiprocessing.util import Finalize


def end_with_parent() -> None:
    """Call in a worker at its start. A helper that waits for work would otherwise outlive a killed parent for ever."""
    threading.Thread(target=_wait_for_the_end, daemon=True).start()


def end_without_finalising() -> None:
    """Call in a worker at its start: once its work is done and its queues are closed, the process ends at once.

    A spawned process otherwise takes the interpreter down under the queue's own thread. Where that thread is just
    inside torch, C++ finds itself unwound and aborts the process.
    """
    Finalize(None, lambda: os._exit(1 if sys.exc_info()[0] else 0), exitpriority=-1000)


def _wait_for_the_end() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
