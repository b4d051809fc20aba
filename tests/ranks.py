"""Starts gloo ranks on this machine for tests, as processes that always end.

One start costs seconds (imports), so a test file starts once and runs its cases in a loop inside the function.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed import TCPStore

_GRACE_SECONDS = 5.0


class RankFailure(AssertionError):
    """A rank raised, died or took too long. The message holds the traceback of the rank that failed first."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """Calls `function(*args)` on `world_size` ranks and returns what each of them returned, by rank.

    Each rank is a fresh process with the variables that torchrun sets, one thread, and the gloo process group started.
    `function`, its arguments and results are pickled: a module's function, not a nested one.

    Raises:
        RankFailure: a rank raised or died, or `timeout` seconds have passed. No process is left behind in any case.
    """
    # The store's own port comes from the system; the ranks join it as clients, so nobody can take the port in between.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Importing torch, megatron and DeepSpeed takes longer than most tests: done once, in the server that forks ranks.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.rank_imports"])
    processes: list[BaseProcess] = []
    pipes: dict[Connection, int] = {}
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(rank, world_size, store.port, theirs, function, args), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = rank
        return _collect(pipes, time.monotonic() + timeout, timeout)
    except RankFailure:
        _show_where_they_are(processes)
        raise
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store


def _show_where_they_are(processes: list[BaseProcess]) -> None:
    """Lets the ranks still alive print their tracebacks on stderr: each has faulthandler enabled."""
    for process in processes:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGABRT)
    for process in processes:
        process.join(2)


def _collect(pipes: dict[Connection, int], deadline: float, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[str] = []
    while len(results) + len(failures) < len(pipes):
        waiting = [pipe for pipe, rank in pipes.items() if rank not in results and not pipe.closed]
        ready = [pipe for pipe in wait(waiting, max(0.0, deadline - time.monotonic())) if isinstance(pipe, Connection)]
        if not ready:
            if not failures:
                late = sorted(pipes[pipe] for pipe in waiting)
                raise RankFailure(f"ranks {late} had not finished after {timeout:.0f} seconds")
            break
        for pipe in ready:
            rank = pipes[pipe]
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                succeeded, value = False, "died without a word"
            if succeeded:
                results[rank] = value
            else:
                failures.append(f"rank {rank}: {value}")
                pipe.close()
                # The others mostly fail because this one did, or wait for it: their words are worth a short wait only.
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if failures:
        raise RankFailure("\n".join(failures))
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    rank: int, world_size: int, port: int, pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR="cpu",
    )
    faulthandler.enable()
    # More ranks than cores, and each collective wakes them all: without preemption at every wake-up the same work takes
    # a sixth less time. Objects of the imported libraries need not be looked at by DeepSpeed's calls of gc.collect.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    gc.freeze()
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        value = function(*args)
        dist.destroy_process_group()
        _send(pipe, True, value)
    except BaseException:
        sys.stdout.flush()
        _send(pipe, False, traceback.format_exc())


def _send(pipe: Connection, succeeded: bool, value: Any) -> None:
    # Plain bytes: torch's own pickler for pipes sends a handle to shared memory, which ends with this process.
    pipe.send_bytes(pickle.dumps((succeeded, value)))
