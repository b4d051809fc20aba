"""The roofline's prediction of other systems' published speeds: a sanity check, not a test of this system.

    .venv/bin/python benchmarks/published.py

Speeds are from llm-foundry's table (mosaicml/llm-foundry, scripts/train/benchmarking/README.md, commit
061f2c7ce64e655100286584a7629e2a09f827ba): MPT models, FSDP with fully sharded weights, bf16, no recomputation, nodes of
8 GPUs, 1600 Gb/s between nodes with A100. Their MLP of two matrices D x 4 D stands here as three of D x 8/3 D: the same
parameters and products. One row for each generation of GPUs was used to fit `Efficiency.matmul`; the others were not.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fastslow_scale.config import Config
from fastslow_scale.plan.machine import machine_for
from fastslow_scale.plan.roofline import step_time
from fastslow_scale.train.engine import BUCKET_ELEMENTS

SHAPES = {
    "125m": (768, 12, 12),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
}
"""hidden_size, layers, heads (scripts/train/yamls/pretrain/mpt-*.yaml)."""


@dataclass(frozen=True)
class Row:
    gpu: str
    model: str
    seq_length: int
    gpus: int
    micro_batch_size: int
    accumulation: int
    tokens_per_second: int
    fitted: bool = False


ROWS = [
    Row("h100", "1b", 2048, 8, 14, 1, 45455, fitted=True),
    Row("h100", "760m", 2048, 8, 24, 2, 63147),
    Row("h100", "760m", 2048, 16, 24, 1, 68551),
    Row("h100", "1b", 2048, 64, 20, 1, 44402),
    Row("h100", "1b", 4096, 8, 7, 4, 38535),
    Row("h100", "1b", 8192, 8, 3, 4, 29157),
    Row("h100", "3b", 2048, 16, 10, 3, 24142),
    Row("h100", "3b", 2048, 64, 6, 3, 22525),
    Row("h100", "7b", 2048, 8, 6, 1, 10643),
    Row("a100", "1b", 2048, 8, 14, 4, 20513, fitted=True),
    Row("a100", "125m", 2048, 8, 32, 2, 141737),
    Row("a100", "760m", 2048, 8, 24, 2, 32434),
    Row("a100", "1b", 4096, 8, 7, 4, 17807),
    Row("a100", "1b", 8192, 8, 3, 4, 13814),
    Row("a100", "3b", 2048, 8, 10, 2, 10811),
    Row("a100", "7b", 2048, 8, 6, 2, 4641),
]


def predicted(row: Row) -> tuple[float, float]:
    """Tokens/s of one GPU, and MFU."""
    hidden, layers, heads = SHAPES[row.model]
    config = Config.model_validate(
        {
            "model": {
                "variant": "dense",
                "vocab_size": 50368,
                "hidden_size": hidden,
                "intermediate_size": 8 * hidden // 3,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "tie_word_embeddings": True,
            },
            "parallel": {"zero_stage": 3},
            "train": {
                "dtype": "bf16",
                "seq_length": row.seq_length,
                "micro_batch_size": row.micro_batch_size,
                "global_batch_size": row.micro_batch_size * row.accumulation * row.gpus,
                "max_steps": 1,
            },
        }
    )
    network = 1600.0 if row.gpu == "a100" else 3200.0
    found = step_time(config, machine_for(config, row.gpu, row.gpus // 8, 8, network), BUCKET_ELEMENTS)
    return found.tokens_per_second / row.gpus, found.mfu


def main() -> None:
    print("| GPU | model | tokens | GPUs | published tokens/s/GPU | predicted | difference | predicted MFU | fitted |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in ROWS:
        speed, mfu = predicted(row)
        off = speed / row.tokens_per_second - 1
        print(
            f"| {row.gpu} | {row.model} | {row.seq_length} | {row.gpus} | {row.tokens_per_second:,} | {speed:,.0f} "
            f"| {off:+.0%} | {mfu:.1%} | {'yes' if row.fitted else ''} |"
        )


if __name__ == "__main__":
    main()
