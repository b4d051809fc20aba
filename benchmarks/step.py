"""What one optimizer step costs: our full path beside plain loops, all on this machine, in one run.

    .venv/bin/python benchmarks/step.py [--rounds N] [--tokens N] [--threads N] [--seconds N] [--profile]

Every variant lives in a process of its own, in the environment that the launcher gives its ranks. The processes take
turns: in each round every one runs a step while the others wait, in an order that moves on from round to round. A ratio
is the median over the rounds of (step time of the variant / step time of the best plain loop, same round), so that what
slows the machine down for a while slows both sides of it. CPU ratio is the same for the CPU seconds of the process, all
threads together: other programs on the machine disturb it less.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fastslow_scale.launch.local import rank_environment

SEQ_LENGTH = 256
SEED = 0
WARMUP_STEPS = 3
FEWEST_ROUNDS = 3
MODEL = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}

Step = Callable[[Any], None]


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    title: str
    loop: Literal["plain", "hugging_face", "engine"]
    model: Literal["dense", "coupled"] = "dense"
    zero_stage: int = 0
    malloc_settings: bool = True

    @property
    def is_plain(self) -> bool:
        return self.loop != "engine"


VARIANTS = [
    Variant("plain torch loop, our model", "plain"),
    Variant("Hugging Face Llama, plain loop", "hugging_face"),
    Variant("full path, ZeRO-0", "engine", zero_stage=0),
    Variant("full path, ZeRO-1", "engine", zero_stage=1),
    Variant("full path, ZeRO-1, coupled", "engine", "coupled", zero_stage=1),
    Variant("plain torch loop, default malloc", "plain", malloc_settings=False),
    Variant("full path, ZeRO-1, default malloc", "engine", zero_stage=1, malloc_settings=False),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24, help="turns of every variant (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=300, help="no new round after these (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1, help="steps of a turn (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=4096, help=f"tokens of a step, a multiple of {SEQ_LENGTH}")
    parser.add_argument("--threads", type=int, default=None, help="of each process (default: what the launcher takes)")
    parser.add_argument("--profile", action="store_true", help="then profile plain torch and ZeRO-1")
    options = parser.parse_args()
    if options.tokens < SEQ_LENGTH or options.tokens % SEQ_LENGTH:
        parser.error(f"--tokens must be a multiple of {SEQ_LENGTH}")
    if options.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)

    load = os.getloadavg()[0]
    workers = [Worker(variant, options.tokens) for variant in VARIANTS]
    try:
        for worker in workers:
            worker.wait_until_ready()
        seconds: list[list[tuple[float, float]]] = [[] for _ in workers]
        deadline = time.monotonic() + options.seconds
        for turn in range(options.rounds):
            if turn >= FEWEST_ROUNDS and time.monotonic() > deadline:
                break
            first = turn % len(workers)
            for number in [*range(first, len(workers)), *range(first)]:
                seconds[number].append(workers[number].ask("run", options.steps))
        print_table(workers, seconds, options, load)
        if options.profile:
            for worker in (workers[0], workers[3]):
                print(f"\n{worker.variant.title}:\n{worker.ask('profile', options.steps)}")
    finally:
        for worker in workers:
            worker.end()


def print_table(
    workers: list[Worker], seconds: list[list[tuple[float, float]]], options: argparse.Namespace, load: float
) -> None:
    """`seconds`: of each worker and round, the wall-clock and the CPU seconds of a step."""
    import torch

    medians = [statistics.median(wall for wall, _ in turns) for turns in seconds]
    best = min((n for n, worker in enumerate(workers) if worker.variant.is_plain), key=lambda n: medians[n])
    print(
        f"{workers[0].parameters / 1e6:.1f}M parameters (dense), fp32, {options.tokens} tokens a step, TP=1, one rank,"
    )
    print(f"{workers[0].threads} threads, {processor()}, torch {torch.__version__},")
    print(f"{len(seconds[0])} rounds of {options.steps} steps, load average before the start {load:.1f}\n")
    print("| step time / best plain loop | quartiles | CPU ratio | tokens/s | ms a step | peak MB | variant |")
    print("|---|---|---|---|---|---|---|")
    for worker, turns, median in zip(workers, seconds, medians, strict=True):
        pairs = list(zip(turns, seconds[best], strict=True))
        low, middle, high = quartiles([own[0] / reference[0] for own, reference in pairs])
        cpu = quartiles([own[1] / reference[1] for own, reference in pairs])[1]
        speed = f"{options.tokens / median:.0f} | {median * 1e3:.0f} | {worker.ask('peak', 0):.0f}"
        name = worker.variant.title + (" (best plain)" if worker is workers[best] else "")
        print(f"| {middle:.3f} | {low:.3f} - {high:.3f} | {cpu:.3f} | {speed} | {name} |")


def quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def processor() -> str:
    """The CPU's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


class Worker:
    """A process that builds one variant and runs its steps when asked."""

    def __init__(self, variant: Variant, tokens: int):
        self.variant = variant
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(variant, tokens, theirs), daemon=True)
        with environment(variant):
            self._process.start()
        theirs.close()
        self.parameters, self.threads = 0, 0

    def wait_until_ready(self) -> None:
        self.parameters, self.threads = self._pipe.recv()

    def ask(self, what: str, steps: int) -> Any:
        self._pipe.send((what, steps))
        return self._pipe.recv()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def environment(variant: Variant) -> Iterator[None]:
    """glibc reads its settings when a process starts: they must be there before."""
    extra = rank_environment(1)
    if not variant.malloc_settings:
        extra = {name: value for name, value in extra.items() if not name.startswith("MALLOC_")}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name in extra:
            del os.environ[name]


def work(variant: Variant, tokens: int, pipe: Connection) -> None:
    """Build the variant, warm it up, then answer until the parent ends this process."""
    import resource

    import torch

    warnings.filterwarnings("ignore")
    threads = int(os.environ["OMP_NUM_THREADS"])
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    step, parameters = build(variant, tokens)
    generator = torch.Generator().manual_seed(SEED)
    rows = torch.randint(0, MODEL["vocab_size"], (8, tokens // SEQ_LENGTH, SEQ_LENGTH + 1), generator=generator)
    for number in range(WARMUP_STEPS):
        step(rows[number])
    pipe.send((parameters, threads))
    count = 0
    while True:
        what, steps = pipe.recv()
        if what == "peak":
            pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
            continue
        profiler = torch.profiler.profile() if what == "profile" else None
        if profiler:
            profiler.start()
        started, cpu_started = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step(rows[count % len(rows)])
            count += 1
        spent, cpu_spent = time.perf_counter() - started, time.process_time() - cpu_started
        if profiler:
            profiler.stop()
            pipe.send(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
        else:
            pipe.send((spent / steps, cpu_spent / steps))


def build(variant: Variant, tokens: int) -> tuple[Step, int]:
    """The step of a variant, a function of [sequences, SEQ_LENGTH + 1] tokens, and its model's parameters."""
    if variant.loop == "hugging_face":
        return hugging_face()
    return (engine if variant.loop == "engine" else plain)(variant, tokens // SEQ_LENGTH)


def config_of(variant: Variant, sequences: int) -> Any:
    from fastslow_scale.config import Config

    return Config.model_validate(
        {
            "model": MODEL | {"variant": variant.model},
            "slow": {"pool_size": 8, "num_layers": 2},
            "parallel": {"zero_stage": variant.zero_stage},
            "train": {
                "seed": SEED,
                "seq_length": SEQ_LENGTH,
                "micro_batch_size": sequences,
                "global_batch_size": sequences,
                "max_steps": 100_000,
            },
        }
    )


def plain(variant: Variant, sequences: int) -> tuple[Step, int]:
    """Our model, torch's fused AdamW and clipping, nothing else."""
    import torch

    from fastslow_scale.model.model import build_model
    from fastslow_scale.parallel.mesh import single_process_mesh
    from fastslow_scale.train.optimizer import build_optimizer

    config = config_of(variant, sequences)
    model = build_model(config, single_process_mesh())
    optimizer = build_optimizer(model, config)

    def step(rows: torch.Tensor) -> None:
        loss = model(rows[:, :-1], rows[:, 1:]) / (rows.shape[0] * SEQ_LENGTH)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.grad_clip)
        optimizer.step()
        optimizer.zero_grad()

    return step, count(model)


def engine(variant: Variant, sequences: int) -> tuple[Step, int]:
    """What the training loop does between two batches, at TP=1: labels, schedule, DeepSpeed, guard, stop signal."""
    import torch

    from fastslow_scale.model.model import build_model
    from fastslow_scale.parallel.mesh import single_process_mesh
    from fastslow_scale.train.batch import count_valid, inputs_and_labels, mean_loss
    from fastslow_scale.train.engine import Engine
    from fastslow_scale.train.guard import Guard
    from fastslow_scale.train.loop import agreed_signal
    from fastslow_scale.train.schedule import learning_rate

    config, mesh = config_of(variant, sequences), single_process_mesh()
    engine, guard = Engine(build_model(config, mesh), config, mesh), Guard(config.train)
    steps = 0

    def step(rows: torch.Tensor) -> None:
        nonlocal steps
        tokens, labels = inputs_and_labels(rows, pad_id=-1)
        valid = count_valid(labels, mesh)
        engine.set_learning_rate(learning_rate(config, steps))
        loss_sum = engine.forward(tokens, labels)
        loss = mean_loss(loss_sum, valid, mesh)
        update = engine.backward(loss_sum, valid, discard=loss > guard.skip_above)
        assert update is not None and guard.judge(loss.item(), update.grad_norm, update.applied) is None
        assert agreed_signal(0, mesh) is None
        steps += 1

    return step, count(engine.model)


def hugging_face() -> tuple[Step, int]:
    """LlamaForCausalLM of the same shape with its own loss, as its users train it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**MODEL, attn_implementation="sdpa", tie_word_embeddings=False))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(rows: torch.Tensor) -> None:
        model(input_ids=rows[:, :-1], labels=rows[:, :-1], use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, count(model)


def count(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    main()
