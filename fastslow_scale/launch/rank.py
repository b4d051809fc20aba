"""One rank started by `fastslow_scale.launch.local`: runs a module and says why it failed, once.

    python -m fastslow_scale.launch.rank LAUNCHER_PID MODULE [ARGUMENT ...]

Imports nothing heavy, so that the rank is tied to its launcher, and its errors are caught, from the first moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from data_pipeline.errors import UserError
from fastslow_scale.errors import RunError
from fastslow_scale.launch.signals import start_again_on_signal


def main(launcher_pid: int, module: str, arguments: list[str]) -> None:
    end_with_parent(launcher_pid)
    work_in_long_stretches()
    start_again_on_signal()
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except UserError as error:
        _fail(2, str(error), user_error=True)
    except RunError as error:
        _fail(1, str(error), user_error=True)
    except SystemExit as ended:
        _end(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
    except KeyboardInterrupt:
        _fail(1, "interrupted", user_error=True)
    except Exception as error:
        _fail(1, _traceback(error), user_error=False)


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies: a launcher killed with -9 leaves no rank training on."""
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def work_in_long_stretches() -> None:
    """Ranks on one machine wake each other at every collective: preemption at each wake-up would cost a sixth."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a parent that runs at idle priority does not let its children out
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _traceback(error: BaseException) -> str:
    """Python's own text, from the module's first frame on."""
    frame = error.__traceback__
    while frame and frame.tb_next and frame.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame)).rstrip()


def _fail(code: int, text: str, *, user_error: bool) -> NoReturn:
    """Leave the reason for the launcher, which shows the first one of all ranks, and end this rank at once."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        now = time.time()
        reason = {"message": text, "timestamp": int(now), "time": now, "user_error": user_error}
        temporary = Path(f"{error_file}.part")
        temporary.write_text(json.dumps(reason), encoding="utf-8")
        temporary.replace(error_file)
    else:
        print(text, file=sys.stderr)
    _end(code)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the destructors of process groups and non-daemon threads may wait for ranks that are gone.
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
