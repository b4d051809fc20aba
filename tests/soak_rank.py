"""A rank of the soak: the real worker, with writes to the disk slowed down, and marks of when a save goes on.

    python -m tests.soak_rank MARKS SECONDS ARGUMENTS-OF-THE-WORKER...

MARKS gets a line `begin` or `end` for each file that is flushed; each flush takes SECONDS longer.
"""

from __future__ import annotations

import os
import sys
import time

from fastslow_scale.train import checkpoint_files, worker


def main(marks: str, seconds: float, arguments: list[str]) -> None:
    flush = os.fsync

    class SlowDisk:
        """`os`, as the module that writes checkpoints sees it."""

        def __getattr__(self, name: str) -> object:
            return getattr(os, name)

        @staticmethod
        def fsync(descriptor: int) -> None:
            _note(marks, "begin")
            time.sleep(seconds)
            flush(descriptor)
            _note(marks, "end")

    checkpoint_files.os = SlowDisk()  # type: ignore[assignment]
    worker.main(arguments)


def _note(marks: str, word: str) -> None:
    with open(marks, "a", encoding="utf-8") as file:
        file.write(word + "\n")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3:])
