"""Kills a run again and again, and shows that nothing is lost.

    python -m tests.soak [--cycles 30] [--seed 0]

Four ranks (tensor parallel 2 x data parallel 2, ZeRO-1, saves in the background) train a small model. In each cycle one
rank, or the launcher with all of them, gets SIGKILL: every third time at any moment from the start of the processes on,
the other times while a save is being written, which a slow disk draws out. The same command then goes on. In the end
metrics and checkpoint must equal those of an uninterrupted run bit for bit. Exit status 1 if they do not.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
import yaml
from rich.console import Console

from data_pipeline.files import write_durably
from fastslow_scale.monitor import read_metrics
from fastslow_scale.train.checkpoint_reader import MOMENTS, WEIGHTS, CheckpointReader
from tests.commands import REPOSITORY, fastslow
from tests.configs import BASE

LENGTH, VOCABULARY = 18, 320
STEPS_OF_A_CYCLE = 12
SLOWER = 0.15
LAUNCH = (
    "import sys; from fastslow_scale.launch.local import launch; sys.exit(launch(4, 'tests.soak_rank', sys.argv[1:]))"
)


@dataclass
class Tally:
    """What the kills hit."""

    cycles: int = 0
    inside_saves: int = 0
    of_all: int = 0
    steps_redone: int = 0
    resumed_at: list[int] = field(default_factory=list)


def prepare(folder: Path, total: int) -> Path:
    """A corpus of made-up words as shards, and a config for it."""
    chance = random.Random(1)
    words = ["".join(chance.choices("aeioubdfgklmnprst", k=chance.randint(2, 7))) for _ in range(150)]
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(60):
        text = "\n".join(" ".join(chance.choices(words, k=9)) + "." for _ in range(12))
        (corpus / f"{number:03}.txt").write_text(text)
    given = ["--input", corpus, "--output"]
    fastslow("data", "tokenizer", *given, folder / "tok", "--vocab-size", VOCABULARY)
    fastslow("data", "shard", *given, folder / "shards", "--tokenizer", folder / "tok", "--seq-len", LENGTH)
    tree = {name: dict(section) for name, section in BASE.items()}
    tree["model"] |= {"vocab_size": VOCABULARY, "num_key_value_heads": 4}
    tree["parallel"] = {"tensor_parallel_size": 2, "sequence_parallel": True, "zero_stage": 1}
    tree["data"] = {"path": str(folder / "shards")}
    tree["train"] |= {"seq_length": LENGTH, "max_steps": total}
    tree["checkpoint"] = {"every": 5, "keep": 2}
    tree["monitor"] = {"log_every": 1}
    tree["validation"] = {"every": 10, "max_sequences": 16}
    path = folder / "soak.yaml"
    write_durably(path, yaml.safe_dump(tree).encode())
    return path


class Run:
    """One start of the four ranks, ended at the latest when the block ends."""

    def __init__(self, config: Path, run_dir: Path, folder: Path):
        self.marks, self._output = folder / "marks", folder / "output"
        self.marks.write_text("")
        self.output = self._output.open("w+b")
        arguments = [str(self.marks), str(SLOWER), str(config), f"train.run_dir={run_dir}"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *arguments],
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.output.close()

    def lines(self) -> list[str]:
        return self._output.read_text(errors="replace").splitlines()

    def steps(self) -> list[int]:
        """The steps logged so far."""
        return [int(line.split("/")[0].split()[1]) for line in self.lines() if line.startswith("step ") and "/" in line]

    def resumed_at(self) -> int:
        places = [line for line in self.lines() if line.startswith("resuming from")]
        return int(places[-1].rsplit("_", 1)[1]) if places else 0

    def is_saving(self) -> bool:
        marks = self.marks.read_text().split()
        return marks.count("begin") > marks.count("end")

    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def over(self) -> bool:
        return self.process.poll() is not None


def cycle(run: Run, kind: str, chance: random.Random, tally: Tally) -> None:
    """Kill the run at the moment that `kind` says."""
    deadline = time.monotonic() + (chance.uniform(0, 25) if kind == "any moment" else 300)
    saves_to_pass = chance.randint(0, 1)
    was_saving = False
    while not run.over() and time.monotonic() < deadline:
        if len(run.steps()) >= STEPS_OF_A_CYCLE:
            break
        saving = run.is_saving()
        if kind == "inside a save" and saving and not was_saving:
            if not saves_to_pass:
                time.sleep(chance.uniform(0, 4 * SLOWER))
                break
            saves_to_pass -= 1
        was_saving = saving
        time.sleep(0.01)
    inside = run.is_saving()
    ranks = [] if run.over() else run.ranks()
    if ranks and chance.random() < 0.5:
        chance.choice(ranks).kill()
    else:
        run.process.kill()  # the kernel then kills the ranks
        tally.of_all += 1
    psutil.wait_procs(ranks, timeout=60)
    run.process.wait(timeout=60)
    if run.process.returncode == 0:
        raise SystemExit("the run had ended before it was killed: give it more steps")
    tally.cycles += 1
    tally.inside_saves += inside


def soak(cycles: int, seed: int, folder: Path, console: Console) -> bool:
    chance = random.Random(seed)
    total = (cycles + 2) * STEPS_OF_A_CYCLE
    config = prepare(folder, total)
    tally, reached = Tally(), 0
    for number in range(cycles):
        kind = "any moment" if number % 3 == 2 else "inside a save"
        with Run(config, folder / "killed", folder) as run:
            cycle(run, kind, chance, tally)
            steps, resumed = run.steps(), run.resumed_at()
            if steps:
                tally.steps_redone += max(0, reached - resumed)
                tally.resumed_at.append(resumed)
                reached = max(steps)
        console.print(f"cycle {number + 1}/{cycles}: killed ({kind}) at step {reached}, had gone on from {resumed}")
    for name in ("killed", "uninterrupted"):
        with Run(config, folder / name, folder) as run:
            if run.process.wait() != 0:
                console.print("\n".join(run.lines()[-20:]))
                return False
            if name == "killed":
                tally.steps_redone += max(0, reached - run.resumed_at())
    console.print(
        f"{tally.cycles} kills ({tally.of_all} of all ranks, {tally.cycles - tally.of_all} of one), "
        f"{tally.inside_saves} of them inside a save, {tally.steps_redone} steps redone of {total}"
    )
    same = compare(folder / "killed", folder / "uninterrupted", total)
    console.print("nothing lost: metrics and checkpoint equal an uninterrupted run's bit for bit" if same else "LOST")
    return same


def compare(killed: Path, uninterrupted: Path, total: int) -> bool:
    def exact(run: Path) -> list[tuple[object, ...]]:
        keys = ("step", "tokens", "loss", "lr", "grad_norm", "validation_loss")
        return [tuple(record.get(key) for key in keys) for record in read_metrics(run / "metrics.jsonl")]

    readers = [CheckpointReader(run / "checkpoints" / f"step_{total:08d}") for run in (killed, uninterrupted)]
    return exact(killed) == exact(uninterrupted) and all(
        torch.equal(*(reader.full(name, kind) for reader in readers))
        for name in readers[0].names()
        for kind in (WEIGHTS, *MOMENTS)
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--cycles", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(0 if soak(options.cycles, options.seed, Path(folder), Console()) else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
