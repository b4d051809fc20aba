"""Does a step cost more after ten thousand steps than after a hundred?

    .venv/bin/python benchmarks/long_run.py [--steps 10000] [--rounds 3] [--output DIR]

Two runs of `fastslow train` on the same tiny model, one thread each. The second starts when the first has done so many
steps. The first's late steps and the second's early ones are then measured at the same moments on the same machine:
whatever disturbs one disturbs the other. Printed is the median over the windows of (CPU seconds a step of the late run
/ of the early run), and how much memory each rank held. CPU seconds are those of the rank's whole process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from benchmarks.interleave import processor, quartiles

REPOSITORY = Path(__file__).resolve().parents[1]
EARLY = 100
LOG_EVERY = 10
POLL_SECONDS = 0.005


@dataclass(frozen=True)
class Sample:
    """How far a run was at a moment."""

    step: int
    cpu_seconds: float
    resident: int


class Run:
    """`fastslow train` on one rank, and what it says of itself while it goes on."""

    def __init__(self, config: str, steps: int, folder: Path):
        shutil.rmtree(folder, ignore_errors=True)
        self._metrics, self._read, self._step = folder / "metrics.jsonl", 0, 0
        keys = {
            "model.hidden_size": 32,
            "model.intermediate_size": 64,
            "model.num_hidden_layers": 2,
            "slow.exchange_after": "[1]",
            "slow.num_layers": 1,
            "parallel.tensor_parallel_size": 1,
            "parallel.sequence_parallel": "false",
            "train.micro_batch_size": 1,
            "train.global_batch_size": 1,
            "train.max_steps": steps,
            "train.run_dir": folder,
            "monitor.log_every": LOG_EVERY,
            "validation.every": 0,
            "validation.max_sequences": 1,
            "checkpoint.every": 1000,
        }
        command = [sys.executable, "-m", "fastslow_scale.cli", "train", config]
        command += [f"{key}={value}" for key, value in keys.items()]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        self._launcher = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        self._rank: psutil.Process | None = None

    def wait_for(self, step: int) -> None:
        """Until it has done so many steps."""
        while self.sample().step < step:
            time.sleep(POLL_SECONDS)

    def at_next_log(self) -> Sample:
        """At the moment when it has logged a step: only then is it known which step it is at."""
        before = self.sample().step
        while (found := self.sample()).step == before:
            time.sleep(POLL_SECONDS)
        return found

    def sample(self) -> Sample:
        """Of the rank's process, at its last logged step; step 0 as long as there is none."""
        if self._launcher.poll() is not None:
            sys.exit(f"the run ended with exit status {self._launcher.returncode} before it was measured")
        if self._rank is None:
            children = psutil.Process(self._launcher.pid).children()
            self._rank = children[0] if children else None
        step = self._logged()
        if self._rank is None or not step:
            return Sample(0, 0.0, 0)
        spent = self._rank.cpu_times()
        return Sample(step, spent.user + spent.system, self._rank.memory_info().rss)

    def _logged(self) -> int:
        """The last logged step; the file only grows."""
        with contextlib.suppress(FileNotFoundError), self._metrics.open(encoding="utf-8") as file:
            file.seek(self._read)
            while (line := file.readline()).endswith("\n"):
                self._read += len(line.encode())
                self._step = max(self._step, json.loads(line)["step"])
        return self._step

    def end(self) -> None:
        """Its rank ends with it."""
        self._launcher.kill()
        self._launcher.wait()


@dataclass(frozen=True)
class Pair:
    """One window, measured in both runs at once: CPU seconds a step."""

    late: float
    early: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/tiny.yaml", help="whose data is read (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10_000, help="of the late run (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=20, help="of each round (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a window (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="where the runs go (default: a folder that vanishes)")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    pairs: list[Pair] = []
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        for turn in range(options.rounds):
            with compared(options, (options.output or Path(name)) / str(turn)) as (late, early):
                first = late.sample(), early.sample()
                for _ in range(options.windows):
                    pairs.append(window(late, early, options.seconds))
                last = late.sample(), early.sample()
            for run, start, stop in zip(("late", "early"), first, last, strict=True):
                held = f"{start.resident / 1e6:.0f} to {stop.resident / 1e6:.0f}"
                lines.append(f"| {turn} | {run} | {start.step} to {stop.step} | {held} |")
    low, middle, high = quartiles([pair.late / pair.early for pair in pairs])
    print(f"{processor()}, one thread a run, {len(pairs)} windows of {options.seconds:g} s,")
    print(f"load average before the start {load:.1f}\n")
    print(f"a late step takes {middle:.3f} of an early one's CPU seconds (quartiles {low:.3f} - {high:.3f});")
    print(f"medians: late {1e3 * statistics.median(pair.late for pair in pairs):.2f} ms, ", end="")
    print(f"early {1e3 * statistics.median(pair.early for pair in pairs):.2f} ms\n")
    print("| round | run | steps | MB resident |", "|---|---|---|---|", *lines, sep="\n")


@contextlib.contextmanager
def compared(options: argparse.Namespace, folder: Path) -> Iterator[tuple[Run, Run]]:
    """A run at `--steps`, and one that has done a hundred: both go on far enough to be measured."""
    enough = 100 * options.steps
    late = Run(options.config, enough, folder / "late")
    try:
        late.wait_for(options.steps)
        early = Run(options.config, enough, folder / "early")
        try:
            early.wait_for(EARLY)
            yield late, early
        finally:
            early.end()
    finally:
        late.end()


def window(late: Run, early: Run, seconds: float) -> Pair:
    """Both runs over the same seconds."""
    before = late.at_next_log(), early.at_next_log()
    time.sleep(seconds)
    after = late.at_next_log(), early.at_next_log()
    spent = [(b.cpu_seconds - a.cpu_seconds) / (b.step - a.step) for a, b in zip(before, after, strict=True)]
    return Pair(*spent)


if __name__ == "__main__":
    main()
