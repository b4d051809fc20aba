"""What a checkpoint costs a run: the time that training stands still, memory, and the way back to the first step.

    .venv/bin/python benchmarks/checkpoint.py [--nproc N] [--rounds N] [--layers N] [--data DIR]

configs/125m.yaml's width and depth with the vocabulary of the demo's data (`make data/demo`), in fp32 on CPU ranks that
`fastslow`'s own launcher starts. One run saves in turn asynchronously and synchronously, from the same engine into two
folders on the same disk (under runs/); between the saves it trains. Then the run is started anew with the files out of
the page cache, and the time to the first step is split.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_pipeline.index import Manifest
from fastslow_scale.config import Config
from fastslow_scale.config_file import load_config
from fastslow_scale.launch.local import launch

REPOSITORY = Path(__file__).resolve().parents[1]
PLAIN_STEPS = 2  # of a round, without any save


def benchmark_config(data: Path, layers: int, ranks: int, run: Path) -> Config:
    tree = load_config(REPOSITORY / "configs" / "125m.yaml").model_dump()
    manifest = Manifest.load(data)
    tree["model"] |= {"vocab_size": manifest.vocab_size, "num_hidden_layers": layers}
    tree["data"] |= {"path": str(data), "num_workers": 0}
    tree["train"] |= {
        "run_dir": run,
        "dtype": "fp32",
        "seq_length": manifest.seq_length,
        "micro_batch_size": 1,
        "global_batch_size": ranks,
    }
    return Config.model_validate(tree)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=1, help="data-parallel ranks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="saves of each kind (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=12, help="fast layers (default: %(default)s)")
    parser.add_argument("--data", type=Path, default=REPOSITORY / "data" / "demo")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    load = os.getloadavg()[0]
    (REPOSITORY / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="checkpoint_", dir=REPOSITORY / "runs") as folder:
        config_file = Path(folder) / "config.yaml"
        config = benchmark_config(options.data.resolve(), options.layers, options.nproc, Path(folder) / "run")
        config_file.write_text(config.to_yaml())
        results = {}
        for part in (["save", str(options.rounds)], ["resume", str(time.time())]):
            if part[0] == "resume":
                forget_files(Path(folder) / "run" / "checkpoints")
                part[1] = str(time.time())
            if launch(options.nproc, "benchmarks.checkpoint", ["--rank", str(config_file), *part]) != 0:
                sys.exit(1)
            results |= json.loads((Path(folder) / f"{part[0]}.json").read_text())
    print(f"{results['parameters'] / 1e6:.0f}M parameters, {results['megabytes']:.0f} MB a checkpoint, ", end="")
    print(f"{options.nproc} rank(s) of {results['threads']} threads, load average {load:.1f} before the start\n")
    report(results)


def forget_files(folder: Path) -> None:
    """Out of the page cache, so that a resume has to read the disk."""
    for file in folder.rglob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def report(results: dict[str, Any]) -> None:
    """The ratio first; all numbers are rank 0's."""
    stall = {kind: results[kind]["stall"] for kind in ("asynchronous", "synchronous")}
    ratios = [a / s for a, s in zip(stall["asynchronous"], stall["synchronous"], strict=True)]
    print(f"training stands still, asynchronous / synchronous: {statistics.median(ratios):.3f}", end="")
    print(f" (of {len(ratios)} pairs: {min(ratios):.3f} - {max(ratios):.3f})\n")
    print("| | asynchronous | synchronous |", "|---|---|---|", sep="\n")
    for title, key in (
        ("seconds that training stands still, median", "stall"),
        ("seconds until a step finds it durable, median", "durable"),
        ("step while it is written / step without", "slowdown"),
    ):
        cells = [statistics.median(results[kind][key]) if results[kind][key] else None for kind in stall]
        print(f"| {title} | " + " | ".join("-" if cell is None else f"{cell:.3f}" for cell in cells) + " |")
    everyone = [" ".join(f"{seconds:.2f}" for seconds in stall[kind]) for kind in stall]
    print("| seconds that training stands still, each save | " + " | ".join(everyone) + " |")
    memory = [results[kind]["extra_megabytes"] for kind in stall]
    print("| peak extra memory, MB | " + " | ".join(f"{cell:.0f}" for cell in memory) + " |")
    print(
        f"\nA step without a save takes {results['step']:.2f} s. The host buffers hold {results['buffers']:.0f} MB.\n"
    )
    print(
        "| from the command to the first step after a resume | seconds | MB read from the disk |",
        "|---|---|---|",
        sep="\n",
    )
    for title, seconds, megabytes in results["resume"]:
        print(f"| {title} | {seconds:.2f} | {'' if megabytes is None else f'{megabytes:.0f}'} |")
    print(f"| together | {sum(seconds for _, seconds, _ in results['resume']):.2f} | |")


# --- what the ranks do ---------------------------------------------------------------------------------------------


def rank(config_path: str, part: str, argument: str) -> None:
    config = load_config(config_path)
    import torch.distributed as dist

    from fastslow_scale.parallel.mesh import build_mesh, start_process_group, stop_process_group

    start_process_group(config.train.timeout_seconds)
    mesh = build_mesh(1)
    results = measure_saves(config, mesh, int(argument)) if part == "save" else measure_resume(config, mesh, argument)
    if mesh.is_main:
        (Path(config_path).parent / f"{part}.json").write_text(json.dumps(results))
    dist.barrier()
    stop_process_group()


def measure_saves(config: Config, mesh: Any, rounds: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from fastslow_scale.config import CheckpointConfig
    from fastslow_scale.train.loop import Trainer
    from fastslow_scale.train.rng import rng_state
    from fastslow_scale.train.saver import Saver

    config.checkpoint.asynchronous = False  # the trainer's own saver, which makes the one for the resume
    trainer = Trainer(config, mesh)
    trainer.resume("never")
    batches = trainer.batches()

    def step() -> float:
        before = time.perf_counter()
        trainer.train_step(next(batches))
        return time.perf_counter() - before

    for _ in range(2):
        step()
    dist.barrier()
    resident = memory("VmRSS")
    results: dict[str, Any] = {"threads": torch.get_num_threads()}
    savers = {}
    for kind in ("asynchronous", "synchronous"):
        settings = CheckpointConfig(keep=1, asynchronous=kind == "asynchronous")
        savers[kind] = Saver(trainer.engine.deepspeed, mesh, config.train.run_dir / kind, settings, 600)
        results[kind] = {"stall": [], "durable": [], "slowdown": [], "extra_megabytes": 0.0}
    buffers = savers["asynchronous"]._buffers.bytes / 1e6
    plain: list[float] = []
    state = {"filler": "as a run's"}
    for _ in range(rounds):
        for kind, saver in savers.items():
            mine = [step() for _ in range(PLAIN_STEPS)]
            plain += mine
            dist.barrier()
            forget_peak()
            resident = memory("VmRSS")
            start = time.perf_counter()
            saver.save(trainer.step, state, rng_state(mesh.device))
            results[kind]["stall"].append(time.perf_counter() - start)
            beside = []
            while not saver.check():
                beside.append(step())
            results[kind]["durable"].append(time.perf_counter() - start)
            if beside:
                results[kind]["slowdown"].append(statistics.mean(beside) / statistics.mean(mine))
            held = buffers if kind == "asynchronous" else 0.0
            extra = memory("VmHWM") - resident + held
            results[kind]["extra_megabytes"] = max(results[kind]["extra_megabytes"], extra)
    trainer.save()
    (path,) = trainer.saver.wait()
    manifest = json.loads((path / "manifest.json").read_text())
    results["parameters"] = sum(torch.Size(p["shape"]).numel() for p in manifest["parameters"].values())
    results["megabytes"] = sum(entry["bytes"] for entry in manifest["files"].values()) / 1e6
    return results | {"step": statistics.median(plain), "buffers": buffers}


def measure_resume(config: Config, mesh: Any, started: str) -> dict[str, Any]:
    from fastslow_scale.train import loop
    from fastslow_scale.train.engine import import_deepspeed

    parts: list[tuple[str, float, float | None]] = []

    @contextmanager
    def part(title: str) -> Iterator[None]:
        before, read = time.perf_counter(), disk_reads()
        yield
        parts.append((title, time.perf_counter() - before, (disk_reads() - read) / 1e6))

    def timed(title: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with part(title):
                return function(*args)

        return call

    import_deepspeed()
    parts.append(("process start: launcher, imports, process group", time.time() - float(started), None))
    with part("model and engine"):
        trainer = loop.Trainer(config, mesh)
    loop.find_together = timed("load: verify every byte", loop.find_together)
    loop.load_checkpoint = timed("load: read, convert, hand to the engine", loop.load_checkpoint)
    trainer.resume("auto")
    batches = trainer.batches()
    with part("data: first batch"):
        rows = next(batches)
    with part("first step"):
        trainer.train_step(rows)
    trainer.saver.close()
    return {"resume": parts}


def memory(field: str) -> float:
    """Of this process, in MB: VmRSS (now) or VmHWM (its peak since `forget_peak`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def disk_reads() -> int:
    """Bytes that this process made the disk read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(*sys.argv[2:])
    else:
        main()
