"""One optimizer step here and in other libraries: equal shapes, equal tokens, one machine, in turns.

    .venv/bin/python benchmarks/peers.py --install
    .venv/bin/python benchmarks/peers.py [--lengths 512,2048] [--dtype bf16] [--variants dense,coupled,litgpt]
    .venv/bin/python benchmarks/peers.py --config configs/1b.yaml --variants dense,coupled --steps 5 --profile

Every variant lives in a process of its own and they take turns (benchmarks/interleave.py). The first column is the
median over the rounds of (step time of the variant / step time of the first variant, same round). The share of the
peak is that of the matrix products that the model asks for (fastslow_scale/model/flops.py), against what the machine's
matrix products reach just before each turn; of a known GPU, against its data sheet. Own memory is the most that the
process held, less what it held after its imports; on a GPU, what torch had allocated there. Planned is what `fastslow
plan` predicts of the tensors, without `train.compile`. A variant that cannot run has a row that says why.

The other libraries are those of .venv, but for litgpt: `--install` puts it into .venv-peers, beside the torch of .venv.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import sysconfig
import venv
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch

from benchmarks.interleave import SEED, Built, Failed, Memory, Turn, Worker, paired, processor, take_turns
from fastslow_scale.config import Config
from fastslow_scale.config_file import config_of as with_overrides
from fastslow_scale.config_file import load_config
from fastslow_scale.launch.local import rank_environment

LITGPT = ("litgpt==0.5.13", "transformers>=4.51.3,<4.57")  # the range that litgpt names; .venv's needs a newer hub
PEERS = Path(__file__).resolve().parents[1] / ".venv-peers"
MEMORY_SHARE = 0.8
BATCHES = 8
SHAPE = {
    "model": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
    },
    "slow": {"pool_size": 8, "num_layers": 2},
    "parallel": {"zero_stage": 0},
    "train": {"seq_length": 512, "micro_batch_size": 8, "global_batch_size": 8, "max_steps": 100_000},
}


@dataclass(frozen=True)
class Variant:
    """One row of a table: a loop of benchmarks/loops.py, the keys of the config it changes, its modules."""

    title: str
    loop: str
    changes: tuple[str, ...] = ("model.variant=dense",)
    imports: tuple[str, ...] = ()


OURS = ("fastslow_scale.train.loop", "deepspeed")
VARIANTS = {
    "dense": Variant("ours, dense", "engine", imports=OURS),
    "dense_compiled": Variant(
        "ours, dense, train.compile", "engine", ("model.variant=dense", "train.compile=true"), OURS
    ),
    "dense_zero1": Variant("ours, dense, ZeRO-1", "engine", ("model.variant=dense", "parallel.zero_stage=1"), OURS),
    "coupled": Variant("ours, coupled", "engine", ("model.variant=coupled",), OURS),
    "coupled_p32": Variant("ours, coupled", "engine", ("model.variant=coupled", "slow.pool_size=32"), OURS),
    "matched": Variant("ours, dense with the coupled model's parameters", "engine", imports=OURS),
    "plain": Variant("our dense model, plain loop", "plain", imports=("fastslow_scale.model.model",)),
    "hf": Variant("Hugging Face Llama", "hugging_face", imports=("transformers.models.llama.modeling_llama",)),
    "hf_compiled": Variant(
        "Hugging Face Llama, torch.compile",
        "hugging_face_compiled",
        imports=("transformers.models.llama.modeling_llama", "torch._inductor.compile_fx"),
    ),
    "litgpt": Variant("litgpt", "litgpt", imports=("litgpt.model", "litgpt.utils")),
    "megatron": Variant(
        "megatron-core GPTModel, local spec", "megatron", imports=("megatron.core.models.gpt.gpt_model",)
    ),
}


@dataclass(frozen=True)
class Row:
    """What a variant showed, or why it did not."""

    name: str
    config: Config
    found: list[Turn] | Failed
    about: dict[str, float]
    memory: Memory | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help=f"install {LITGPT[0]} into .venv-peers, and end")
    parser.add_argument("--config", help="shapes and batch of this run, on one rank (default: 7.2M parameters)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="of %(default)s; the first is the reference")
    parser.add_argument("--lengths", help="of the sequences (default: 512, or the config's)")
    parser.add_argument("--tokens", type=int, help="of a step (default: 4096, or a micro-batch of the config)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="(default: fp32, or the config's; bf16 on a GPU)")
    parser.add_argument("--rounds", type=int, default=12, help="turns of every variant (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=900, help="no new round after these (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1, help="steps of a turn (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of each process (default: what the launcher takes)")
    parser.add_argument("--profile", action="store_true", help="then show where each variant's time goes")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.install:
        install()
        return
    names = options.variants.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"--variants: {unknown[0]} is not one of {', '.join(VARIANTS)}")
    if options.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    base = base_config(options)
    lengths = [int(length) for length in options.lengths.split(",")] if options.lengths else [base.train.seq_length]
    for length in lengths:
        tokens = options.tokens or (base.train.micro_batch_size * base.train.seq_length)
        configs = {name: config_of(base, name, length, max(1, tokens // length)) for name in names}
        measure(configs, options)


def install() -> None:
    """A folder of its own for what would change versions in .venv; torch and the rest are found there."""
    venv.create(PEERS, with_pip=False)
    (folder_of_peers() / "environment.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    python = PEERS / "bin" / "python"
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *LITGPT], check=True)


def folder_of_peers() -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(PEERS)}))


def base_config(options: argparse.Namespace) -> Config:
    """On one rank: what the options ask for."""
    tree: dict[str, Any] = load_config(options.config).model_dump() if options.config else SHAPE
    train, parallel = dict(tree["train"]), dict(tree.get("parallel", {}))
    parallel |= {"tensor_parallel_size": 1, "sequence_parallel": False}
    train["dtype"] = options.dtype or train.get("dtype") or "fp32"
    if options.dtype is None and torch.cuda.is_available():
        train["dtype"] = "bf16"
    if train["dtype"] == "bf16" and parallel.get("zero_stage") == 0:
        parallel["zero_stage"] = 1  # DeepSpeed has no sound ZeRO-0 in bf16
    train["global_batch_size"] = train["micro_batch_size"]
    return Config.model_validate({**tree, "train": train, "parallel": parallel})


def config_of(base: Config, name: str, length: int, sequences: int) -> Config:
    """The config of one variant."""
    from fastslow_scale.study.arms import matched_intermediate_size

    def changed(changes: Sequence[str]) -> Config:
        tree = base.model_dump()
        tree["train"] |= {"seq_length": length, "micro_batch_size": sequences, "global_batch_size": sequences}
        return with_overrides(tree, Path(__file__), changes)

    if name == "matched":
        width = matched_intermediate_size(changed(VARIANTS["coupled"].changes), "parameters")
        return changed(["model.variant=dense", f"model.intermediate_size={width}"])
    return changed(VARIANTS[name].changes)


def measure(configs: dict[str, Config], options: argparse.Namespace) -> None:
    """All variants at one length; prints a table."""
    load = os.getloadavg()[0]
    workers: dict[str, Worker] = {}
    failures: dict[str, Failed] = {}
    try:
        for name, config in configs.items():
            try:
                workers[name] = start(name, config)
                workers[name].wait_until_ready()
            except Failed as failure:
                failures[name] = failure
                if name in workers:
                    workers.pop(name).end()  # what it held is for those that come after it
        turns = take_turns(list(workers.values()), options.rounds, options.steps, options.seconds)
        found = dict(zip(workers, turns, strict=True)) | failures
        rows = []
        for name, config in configs.items():
            runs = not isinstance(found[name], Failed)
            about = dict(workers[name].about) if runs else {}
            rows.append(Row(name, config, found[name], about, workers[name].memory() if runs else None))
        print_table(rows, max((worker.threads for worker in workers.values()), default=0), options, load)
        for row in rows if options.profile else []:
            if not isinstance(row.found, Failed):
                print(f"\n{title_of(row)}:\n{workers[row.name].profile(options.steps)}")
    finally:
        for worker in workers.values():
            worker.end()


def start(name: str, config: Config) -> Worker:
    """Raises `Failed`: it is not installed."""
    paths = [str(folder_of_peers())] if name == "litgpt" else []
    if name == "litgpt" and not (folder_of_peers() / "litgpt").is_dir():
        raise Failed("not installed (benchmarks/peers.py --install)")
    # On a GPU the driver reserves more addresses than there is memory.
    limit = None if torch.cuda.is_available() else int(MEMORY_SHARE * psutil.virtual_memory().available)
    variant = VARIANTS[name]
    argument = (variant.loop, config.model_dump())
    return Worker(build, argument, variant.imports, paths, rank_environment(1), limit)


def build(argument: tuple[str, dict[str, Any]]) -> Built:
    """A loop of benchmarks/loops.py on random tokens, the same for all, with this machine's matrix products beside."""
    from benchmarks import loops
    from fastslow_scale.model.flops import count_flops
    from fastslow_scale.monitor.peak import peak_flops
    from fastslow_scale.parallel.mesh import local_device, start_process_group

    loop, tree = argument
    config, device = Config.model_validate(tree), local_device()
    start_process_group()
    train = config.train
    generator = torch.Generator().manual_seed(SEED)
    size = (BATCHES, train.micro_batch_size, train.seq_length + 1)
    rows = torch.randint(0, config.model.vocab_size, size, generator=generator).to(device)
    step, parameters = getattr(loops, loop)(config)
    dtype = torch.bfloat16 if train.dtype == "bf16" else torch.float32
    flops = count_flops(config).training * train.micro_batch_size
    return Built(step, rows, {"parameters": parameters, "flops": flops}, lambda: peak_flops(device, dtype))


def print_table(rows: list[Row], threads: int, options: argparse.Namespace, load: float) -> None:
    config = rows[0].config
    train = config.train
    tokens = train.micro_batch_size * train.seq_length
    on_gpu = torch.cuda.is_available()
    machine = torch.cuda.get_device_name() if on_gpu else f"{threads} threads, {processor()}"
    rounds = max((len(row.found) for row in rows if not isinstance(row.found, Failed)), default=0)
    print(f"\n{train.micro_batch_size} sequences of {train.seq_length} tokens a step, {train.dtype}, one rank,")
    print(f"{machine}, torch {torch.__version__},")
    print(f"{rounds} rounds of {options.steps} steps, load average before the start {load:.1f}\n")
    print(
        f"| step time / {title_of(rows[0])} | quartiles | CPU ratio | share of the peak | tokens/s | own memory, MB |",
        end="",
    )
    print(" planned, MB | parameters | variant |", "|---|---|---|---|---|---|---|---|---|", sep="\n")
    first = rows[0].found
    for row in rows:
        if isinstance(row.found, Failed):
            print(f"| - | - | - | - | - | - | - | - | {title_of(row)}: {row.found} |")
            continue
        ratios = ["-", "-", "-"]
        if not isinstance(first, Failed):
            low, middle, high = paired(row.found, first, lambda turn: turn.seconds)
            cpu = paired(row.found, first, lambda turn: turn.cpu_seconds)[1]
            ratios = [f"{middle:.3f}", f"{low:.3f} - {high:.3f}", f"{cpu:.3f}"]
        share = statistics.median(row.about["flops"] / turn.seconds / turn.yardstick for turn in row.found)
        speed = tokens / statistics.median(turn.seconds for turn in row.found)
        memory = row.memory.own if row.memory else 0.0
        cells = [
            *ratios,
            f"{share:.3f}",
            f"{speed:.0f}",
            f"{memory:.0f}",
            planned_memory(row, on_gpu),
            f"{row.about['parameters']:,}",
            title_of(row),
        ]
        print(f"| {' | '.join(cells)} |")


def planned_memory(row: Row, on_gpu: bool) -> str:
    """What `fastslow plan` predicts of the tensors, in MB; of our whole path only."""
    from fastslow_scale.plan.memory import memory
    from fastslow_scale.train.engine import BUCKET_ELEMENTS

    if VARIANTS[row.name].loop != "engine":
        return "-"
    return f"{memory(row.config, 1, BUCKET_ELEMENTS, on_gpu).peak / 1e6:.0f}"


def title_of(row: Row) -> str:
    coupled = row.config.model.variant == "coupled"
    return VARIANTS[row.name].title + (f" P={row.config.slow.pool_size}" if coupled else "")


if __name__ == "__main__":
    main()
