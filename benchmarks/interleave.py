"""Variants that take turns on one machine, each in a process of its own.

In each round every variant runs some steps while the others wait, in an order that moves on from round to round. What
slows the machine down for a while so slows all of them, and a ratio is the median over the rounds of (variant /
reference, same round). CPU seconds are those of all threads of the process: other programs disturb them less.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import platform
import resource
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SEED = 0
WARMUP_STEPS = 3
FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class Built:
    """What a builder makes in the variant's own process.

    Attributes:
        step: one optimizer step on some of the rows.
        rows: [n, B, T + 1] tokens; step k is given the [B, T + 1] of k modulo n.
        about: numbers for the table, such as parameters.
        yardstick: measured before the steps of each turn, such as the speed of a matrix product.
    """

    step: Callable[[Any], None]
    rows: Any
    about: Mapping[str, float]
    yardstick: Callable[[], float] | None = None


@dataclass(frozen=True)
class Turn:
    """What a step of one turn took, and what the yardstick showed before it."""

    seconds: float
    cpu_seconds: float
    yardstick: float


@dataclass(frozen=True)
class Memory:
    """Megabytes at the most: of the whole process, and beyond what it held once its imports were done.

    On a GPU both are what torch has allocated there.
    """

    whole: float
    own: float


class Failed(Exception):
    """A variant cannot go on; the message is one line and says why."""


class Worker:
    """A process that builds one variant and runs its steps when asked.

    build: a function of `argument` at the top of a module, called in the new process.
    imports: modules that are imported before, so that `Memory.own` leaves them out.
    paths: folders where modules are looked for first.
    environment: what this process is to have before it starts.
    memory_limit: bytes of data after which an allocation fails, instead of the whole machine.
    """

    def __init__(
        self,
        build: Callable[[Any], Built],
        argument: Any,
        imports: Sequence[str] = (),
        paths: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        memory_limit: int | None = None,
    ):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (build, argument, imports, paths, memory_limit, theirs)
        self._process = context.Process(target=work, args=arguments, daemon=True)
        with added_environment(environment or {}):
            self._process.start()
        theirs.close()
        self.threads = 0
        self.about: Mapping[str, float] = {}

    def wait_until_ready(self) -> None:
        """Raises `Failed`."""
        self.threads, self.about = self._receive()

    def run(self, steps: int) -> Turn:
        """Raises `Failed`."""
        self._pipe.send(("run", steps))
        turn: Turn = self._receive()
        return turn

    def memory(self) -> Memory:
        self._pipe.send(("memory", 0))
        found: Memory = self._receive()
        return found

    def profile(self, steps: int) -> str:
        """Torch's table of operators for some steps."""
        self._pipe.send(("profile", steps))
        table: str = self._receive()
        return table

    def end(self) -> None:
        self._process.kill()
        self._process.join()

    def _receive(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode or 0
            name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            raise Failed(f"its process ended ({name})") from None
        if isinstance(answer, Failed):
            raise answer
        return answer


def take_turns(workers: Sequence[Worker], rounds: int, steps: int, seconds: float) -> list[list[Turn] | Failed]:
    """Of each worker its turns, one a round, or why it failed. No new round after `seconds`, once there are a few."""
    found: list[list[Turn] | Failed] = [[] for _ in workers]
    deadline = time.monotonic() + seconds
    for turn in range(rounds):
        if turn >= FEWEST_ROUNDS and time.monotonic() > deadline:
            break
        first = turn % len(workers)
        for number in [*range(first, len(workers)), *range(first)]:
            turns = found[number]
            if isinstance(turns, Failed):
                continue
            try:
                turns.append(workers[number].run(steps))
            except Failed as failure:
                found[number] = failure
    return found


def quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4) if len(values) > 1 else list(values) * 3


def paired(turns: Sequence[Turn], reference: Sequence[Turn], of: Callable[[Turn], float]) -> list[float]:
    """The quartiles of the ratios to the reference of the same round."""
    return quartiles([of(own) / of(other) for own, other in zip(turns, reference, strict=True)])


def processor() -> str:
    """The CPU's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


@contextlib.contextmanager
def added_environment(extra: Mapping[str, str]) -> Iterator[None]:
    """For processes that are started inside: glibc reads its settings when a process starts."""
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def work(
    build: Callable[[Any], Built],
    argument: Any,
    imports: Sequence[str],
    paths: Sequence[str],
    memory_limit: int | None,
    pipe: Connection,
) -> None:
    """Build the variant, warm it up, then answer until the parent ends this process."""
    warnings.filterwarnings("ignore")
    sys.path[:0] = paths
    try:
        for name in ("torch", *imports):
            importlib.import_module(name)
        _answer(build, argument, memory_limit, pipe)
    except Exception as error:
        reason = " ".join(str(error).split("\n", 1)[0].split()) or "no reason given"
        pipe.send(Failed(f"{type(error).__name__}: {reason}"))


def _answer(build: Callable[[Any], Built], argument: Any, memory_limit: int | None, pipe: Connection) -> None:
    import torch

    if memory_limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_limit, memory_limit))
    threads = int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads()))
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    held = resident()[0]
    built = build(argument)
    turns = _Turns(built)
    turns.steps(WARMUP_STEPS)
    pipe.send((threads, dict(built.about)))
    while True:
        what, steps = pipe.recv()
        if what == "memory":
            if torch.cuda.is_available():
                most = torch.cuda.max_memory_allocated() / 1e6
                pipe.send(Memory(most, most))
            else:
                most = resident()[1]
                pipe.send(Memory(most / 1e6, (most - held) / 1e6))
        elif what == "profile":
            with torch.profiler.profile() as profiler:
                turns.steps(steps)
            key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
            pipe.send(profiler.key_averages().table(sort_by=key, row_limit=25))
        else:
            pipe.send(turns.take(steps))


class _Turns:
    """Runs the steps of one variant, and times them."""

    def __init__(self, built: Built):
        import torch

        self._built, self._count = built, 0
        self._on_gpu = torch.cuda.is_available()

    def steps(self, count: int) -> None:
        """Until the last one is done, on a GPU too."""
        import torch

        for _ in range(count):
            self._built.step(self._built.rows[self._count % len(self._built.rows)])
            self._count += 1
        if self._on_gpu:
            torch.cuda.synchronize()

    def take(self, steps: int) -> Turn:
        import torch

        yardstick = self._built.yardstick() if self._built.yardstick else 0.0
        if self._on_gpu:
            self.steps(1)  # fetches the memory that it gave to the others after its last turn
        started, cpu_started = time.perf_counter(), time.process_time()
        self.steps(steps)
        spent, cpu_spent = time.perf_counter() - started, time.process_time() - cpu_started
        if self._on_gpu:
            torch.cuda.empty_cache()
        return Turn(spent / steps, cpu_spent / steps, yardstick)


def resident() -> tuple[int, int]:
    """Bytes of this process in memory, now and at the most.

    Not from getrusage: a spawned process begins there with its parent's maximum.
    """
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    sizes = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return sizes["VmRSS"], sizes["VmHWM"]
