"""Predicted and measured memory of one rank: real runs over gloo on this machine, small models.

    .venv/bin/python benchmarks/memory.py [--alone]

--alone: rank 0 only, its collectives answered by torch's fake process group: the same code and tensors, less work.
Measured is the peak of live tensor bytes of rank 0 over the second and third step: every storage that a torch operation
returned, the engine's and the optimizer's included, until it is freed. The engine's bucket is made small (300,000
elements), so that it does not hide the rest. Nothing was fitted to these runs: the terms were counted.
"""

from __future__ import annotations

import argparse
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastslow_scale.config import Config
from fastslow_scale.plan.memory import Memory, memory

BUCKET_ELEMENTS = 300_000
RANKS = 4
MICRO_BATCHES = 2  # of a step: gradients have to wait for the second
BASE: dict[str, dict[str, Any]] = {
    "model": {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "slow": {"pool_size": 8, "exchange_after": [3], "num_layers": 2},
    "train": {"seq_length": 256, "micro_batch_size": 2, "max_steps": 3},
}


class LiveBytes(TorchDispatchMode):
    """`with LiveBytes() as live:` counts the bytes of all tensors that operations inside make, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._count(tensor.untyped_storage())
        return made

    def start_over(self) -> None:
        """From here on, the peak is that of what follows."""
        self.peak = self.now

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen or not size:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def case(
    variant: str, tp: int, sequence_parallel: bool, zero: int, dtype: str, recompute: str, **train: int
) -> tuple[str, Config]:
    tree = {name: dict(section) for name, section in BASE.items()}
    tree["model"]["variant"] = variant
    tree["parallel"] = {"tensor_parallel_size": tp, "sequence_parallel": sequence_parallel, "zero_stage": zero}
    tree["train"] |= {"dtype": dtype, "recompute": recompute, **train}
    tree["train"]["global_batch_size"] = MICRO_BATCHES * tree["train"]["micro_batch_size"] * (RANKS // tp)
    layout = f"TP {tp}{' SP' if sequence_parallel else ''} x DP {RANKS // tp}"
    batch = f"{tree['train']['micro_batch_size']} x {tree['train']['seq_length']}"
    return f"{variant:8} {dtype} {layout:14} ZeRO-{zero} {recompute:9} {batch}", Config.model_validate(tree)


CASES = [
    case("dense", 1, False, 0, "fp32", "none"),
    case("coupled", 1, False, 1, "fp32", "none"),
    case("coupled", 1, False, 2, "fp32", "full", seq_length=512),
    case("dense", 1, False, 3, "fp32", "none"),
    case("coupled", 1, False, 1, "bf16", "full"),
    case("coupled", 1, False, 2, "bf16", "selective"),
    case("coupled", 1, False, 3, "bf16", "full", seq_length=512),
    case("dense", 2, False, 1, "fp32", "none"),
    case("coupled", 2, False, 0, "fp32", "full"),
    case("dense", 2, True, 1, "bf16", "none"),
    case("coupled", 2, True, 1, "fp32", "full"),
    case("coupled", 2, True, 2, "fp32", "selective"),
    case("coupled", 2, True, 3, "fp32", "none"),
    case("frozen", 2, True, 1, "fp32", "none"),
    case("coupled", 4, True, 1, "bf16", "selective", micro_batch_size=4),
    case("coupled", 4, True, 1, "bf16", "full", seq_length=512, micro_batch_size=4),
    case("dense", 4, True, 2, "fp32", "none", micro_batch_size=4),
    case("coupled", 4, True, 3, "bf16", "none"),
    case("coupled", 4, True, 0, "fp32", "full", micro_batch_size=4),
]


def measure(cases: list[tuple[str, Config]]) -> list[int]:
    """Peak bytes of this rank in each case; every rank calls it."""
    from fastslow_scale.model.model import build_model
    from fastslow_scale.parallel.mesh import build_mesh, start_process_group
    from fastslow_scale.train import engine as engine_module

    engine_module.BUCKET_ELEMENTS = BUCKET_ELEMENTS
    start_process_group()
    peaks = []
    mesh = build_mesh(cases[0][1].parallel.tensor_parallel_size)
    for _, config in cases:
        if config.parallel.tensor_parallel_size != mesh.tp_size:
            mesh = build_mesh(config.parallel.tensor_parallel_size)
        with LiveBytes() as live:
            step = training_step(config, engine_module.Engine(build_model(config, mesh), config, mesh))
            step()
            live.start_over()
            step()
            step()
            peaks.append(live.peak)
            del step
    return peaks


def training_step(config: Config, engine: Any) -> Callable[[], None]:
    """One optimizer step on random tokens."""
    from fastslow_scale.train.batch import count_valid

    rows = config.train.global_batch_size // engine.mesh.dp_size
    shape = (rows, config.train.seq_length + 1)

    def step() -> None:
        tokens = torch.randint(0, config.model.vocab_size, shape)
        valid = count_valid(tokens[:, 1:], engine.mesh)
        for part in tokens.split(config.train.micro_batch_size):
            engine.backward(engine.forward(part[:, :-1], part[:, 1:]), valid)

    return step


def predict(config: Config) -> Memory:
    return memory(config, RANKS // config.parallel.tensor_parallel_size, BUCKET_ELEMENTS, on_gpu=False)


def measure_alone(cases: list[tuple[str, Config]]) -> list[int]:
    """`measure` as rank 0 of `RANKS`, of which no other exists."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    # DeepSpeed asks the environment who it is.
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(RANKS))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    return measure(cases)


def main() -> None:
    from tests.ranks import run_ranks

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--alone", action="store_true", help="rank 0 only, with a fake process group")
    alone = parser.parse_args().alone
    measured = measure_alone(CASES) if alone else run_ranks(RANKS, measure, CASES, timeout=1800)[0]
    print(
        "| run | measured MB | predicted MB | predicted / measured | moment of the peak |",
        "|---|---|---|---|---|",
        sep="\n",
    )
    for (name, config), peak in zip(CASES, measured, strict=True):
        found = predict(config)
        ratio = found.peak / peak
        print(f"| {name} | {peak / 1e6:.1f} | {found.peak / 1e6:.1f} | {ratio:.3f} | {found.peak_moment} |")


if __name__ == "__main__":
    # Imported by its name, so that the ranks can unpickle its functions.
    from benchmarks.memory import main as by_name

    by_name()
