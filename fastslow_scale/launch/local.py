"""Start the ranks of a run on this machine.

The ranks are started by torch's elastic agent, as torchrun would: it gives each its RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT, and ends the others when one fails. What is added here is the environment the ranks run
fastest in, errors a person can read, and that no rank ever outlives its launcher.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import psutil
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from data_pipeline.errors import UserError
from fastslow_scale.launch.signals import EXIT_INTERRUPTED, EXIT_START_AGAIN, STOP_SIGNALS, THE_SAME_COMMAND

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2

SHUTDOWN_SECONDS = 10

FIRST_INTERRUPT = b"stopping; a second SIGINT ends the ranks at once\n"


def launch(
    nproc: int, module: str, arguments: Sequence[str] = (), max_restarts: int = 0, goes_on: str = THE_SAME_COMMAND
) -> int:
    """Run `python -m module *arguments` as `nproc` ranks on this machine; return the exit code to end with.

    0: all ranks ended well. 2: a rank raised `UserError` (its line is printed, once) or exited with 2. 75: the ranks
    ask to be started again, as they do after a signal. 130: a second SIGINT ended them at once. 1: anything else; the
    error of the rank that failed first is printed last, and up to `max_restarts` times all ranks are started again.
    `goes_on` tells the user what to do after a 75.
    Call it from the main thread: it hands the stop signals that this process is sent on to the ranks.
    """
    if nproc < 1:
        raise UserError(f"the number of ranks must be at least 1 (got {nproc})")
    for restart in range(1, max_restarts + 1):
        code = _launch_once(nproc, module, arguments, goes_on)
        if code != EXIT_FAILED:
            return code
        print(f"starting all ranks again ({restart} of {max_restarts})", file=sys.stderr)
    return _launch_once(nproc, module, arguments, goes_on)


def _launch_once(nproc: int, module: str, arguments: Sequence[str], goes_on: str) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="fastslow_ranks_") as log_dir,
        _environment(rank_environment(nproc)),
        _SignalsHandedOn() as signals,
        _elastic_logs_silenced(),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=log_dir),
            shutdown_timeout=SHUTDOWN_SECONDS,
            # By itself the agent would take the stop signals and end the ranks after a fixed time, saved or not.
            signals_to_handle="SIGQUIT",
        )
        command = ["-m", "fastslow_scale.launch.rank", str(os.getpid()), module, *arguments]
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            if signals.interrupts > 1:
                print("ended by a second SIGINT", file=sys.stderr)
                return EXIT_INTERRUPTED
            return _explain(_first_failure(error.failures), goes_on)
    return EXIT_OK


class _SignalsHandedOn:
    """While it is entered, the ranks are sent what this process is sent; after a second SIGINT they are killed."""

    def __init__(self) -> None:
        self.interrupts = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _SignalsHandedOn:
        for number in (*STOP_SIGNALS, signal.SIGHUP, signal.SIGQUIT):
            self._before[number] = signal.getsignal(number)
            if number != signal.SIGQUIT:  # the agent's own, restored all the same
                signal.signal(number, self._hand_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += number == signal.SIGINT
        ranks = psutil.Process().children()
        if not ranks:
            sys.exit(EXIT_START_AGAIN)
        if self.interrupts == 1 and number == signal.SIGINT:
            os.write(sys.stderr.fileno(), FIRST_INTERRUPT)  # print is not safe to interrupt itself
        wanted = signal.SIGKILL if self.interrupts > 1 else signal.SIGTERM if number == signal.SIGHUP else number
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(wanted)


def available_cores() -> int:
    """Cores that this process may run on: a job is often given fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rank_environment(nproc: int) -> dict[str, str]:
    """What the ranks need in their environment before Python starts. What the user has set already stays."""
    cores = available_cores()
    wanted = {"OMP_NUM_THREADS": str(max(1, cores // nproc))}
    if not torch.cuda.is_available():
        # ZeRO allocates and frees buffers of tens of megabytes each step. By default glibc asks the kernel for such
        # memory and gives it back every time, and the page faults cost up to a tenth of the step. With these settings
        # it keeps what it has once got. glibc reads them when a process starts, hence here.
        wanted["MALLOC_MMAP_THRESHOLD_"] = str(16 * 2**30)
        wanted["MALLOC_TRIM_THRESHOLD_"] = str(16 * 2**30)
        wanted["MALLOC_TOP_PAD_"] = str(64 * 2**20)
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank that failed first, which is the cause: what other ranks say is often only that it is gone."""

    def when(item: tuple[int, ProcessFailure]) -> tuple[int, float]:
        failure = item[1]
        reason = failure.error_file_data
        # The agent ends the other ranks by SIGTERM, which those that are still starting up answer with 75.
        doubt = {-signal.SIGTERM: 2, EXIT_START_AGAIN: 1}.get(failure.exitcode, 0)
        if "time" in reason:
            return doubt, float(reason["time"])
        # Others are only known to the second, by when they were found. A rank that a signal killed died before that,
        # and its peers notice at once; an exit without a reason is likely a consequence.
        return doubt, failure.timestamp + (-1 if failure.exitcode < 0 else 1)

    return min(failures.items(), key=when)


def _explain(first_failure: tuple[int, ProcessFailure], goes_on: str) -> int:
    """Print what happened in the rank that failed first, unless it said so itself; return the exit code."""
    rank, failure = first_failure
    reason = failure.error_file_data
    if "time" in reason:
        text = reason["message"] if reason["user_error"] else f"rank {rank} failed:\n{reason['message']}"
        print(f"error: {text}", file=sys.stderr)
    elif failure.exitcode < 0:
        hint = " (by hand, or for want of memory)" if failure.exitcode == -signal.SIGKILL else ""
        print(f"error: rank {rank} was killed by {failure.signal_name()}{hint}", file=sys.stderr)
    elif failure.exitcode == EXIT_START_AGAIN:
        print(f"stopped; {goes_on} (exit status {EXIT_START_AGAIN})", file=sys.stderr)
    elif failure.exitcode != EXIT_BAD_INPUT:
        print(f"error: rank {rank} ended with exit code {failure.exitcode}", file=sys.stderr)
    return failure.exitcode if failure.exitcode in (EXIT_BAD_INPUT, EXIT_START_AGAIN) else EXIT_FAILED


@contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    """The agent hands its own environment to the ranks."""
    before = dict(os.environ)
    os.environ.update(extra)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _elastic_logs_silenced() -> Iterator[None]:
    """The agent logs each failure with its own inner state; `_explain` says what matters instead."""
    logger = logging.getLogger("torch.distributed.elastic")
    silence, propagate = logging.NullHandler(), logger.propagate
    logger.addHandler(silence)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(silence)
        logger.propagate = propagate
