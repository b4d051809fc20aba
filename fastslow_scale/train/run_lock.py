"""One job at a time trains into a run folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from io import TextIOWrapper
from pathlib import Path

from data_pipeline.errors import UserError

FILE_NAME = ".lock"


class RunLock:
    """Held by the first rank of a job from before it looks for a checkpoint to its end, however that comes.

    It is a POSIX record lock. The kernel drops it with the process that took it. The readers that a rank forks do not
    inherit it, as they would a flock, so that a killed rank's last reader cannot keep its successor out.
    """

    def __init__(self, folder: Path):
        self._folder, self._path = folder, folder / FILE_NAME
        self._file: TextIOWrapper | None = None
        self._made: list[Path] = []

    def acquire(self) -> list[str]:
        """Take it, and make the folder if there is none. Returns what to tell.

        Raises:
            UserError: another process holds it, or the folder cannot be written.
        """
        absent = [path for path in (self._folder, *self._folder.absolute().parents) if not path.exists()]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+", encoding="utf-8")
        except OSError as error:
            raise UserError(f"train.run_dir {self._folder} cannot be written: {error.strerror}") from None
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self.close()
            raise UserError(f"train.run_dir {self._folder} is in use: {holder} trains into it") from None
        except OSError as error:  # a file system without locks, as Lustre is unless it is mounted with them
            return [f"warning: {self._folder} cannot be locked ({error.strerror}): keep other runs out of it yourself"]
        self._made = absent
        with contextlib.suppress(OSError):  # a full disk: who holds it is a courtesy
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            self._file.flush()
        return []

    def close(self) -> None:
        """Let it go. A folder that was made for it and got nothing else vanishes again."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            if self._made and [path.name for path in self._folder.iterdir()] == [FILE_NAME]:
                self._path.unlink()
                for path in self._made:
                    path.rmdir()
        with contextlib.suppress(OSError):
            self._file.close()
        self._file = None
