"""The planted effect: dense, coupled and shuffled on a task that only the slow path can carry, over several seeds.

    python -m benchmarks.planted --output runs/planted [--seeds 5]

Trains through `fastslow ablate configs/planted.yaml` and prints how often each run's likeliest token after a question
mark is the document's letter, over the held-out questions that an earlier one answers. Chance is 1/8.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch

from data_pipeline.planted import LETTERS, PERIOD, QUESTION, build_planted
from fastslow_scale.inference.load import load_model
from fastslow_scale.train.batch import open_data

ARMS = ("dense", "coupled", "shuffled")
CONFIG = Path(__file__).parent.parent / "configs" / "planted.yaml"


@torch.no_grad()
def answer_accuracy(run: Path, sequences: int = 256) -> float:
    """Share of right answers to all questions but each document's first. The run's data must still be in its place."""
    loaded = load_model(run)
    _, validation = open_data(loaded.config)
    tokens = validation.rows(list(range(min(sequences, validation.num_samples)))).long()
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    (question,) = loaded.tokenizer.encode(QUESTION)
    asked = inputs == question
    asked[:, :PERIOD] = False
    found = loaded.model.logits(inputs).argmax(-1)
    return (found[asked] == labels[asked]).double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    data = options.output / "data"
    if not data.exists():
        build_planted(data)
    command = ["ablate", str(CONFIG), f"data.path={data}", "--variants", ",".join(ARMS)]
    command += ["--seeds", str(options.seeds), "--output", str(options.output)]
    if subprocess.run([sys.executable, "-m", "fastslow_scale.cli", *command], check=False).returncode:
        sys.exit(1)
    print(f"share of right answers (chance {1 / len(LETTERS):.3f})")
    for arm in ARMS:
        shares = [answer_accuracy(options.output / arm / str(seed)) for seed in range(options.seeds)]
        print(f"{arm:10}", *(f"{share:.3f}" for share in shares))


if __name__ == "__main__":
    main()
