"""Memory of a model of any size on any number of ranks, without the machine: predicted, and by a run of fake tensors.

    .venv/bin/python benchmarks/fake_memory.py configs/1b.yaml configs/7b.yaml --world-size 64

Rank 0's forward and backward of one micro-batch in each recomputation mode: torch's fake tensors have shapes and no
numbers, its fake process group answers the collectives. Counted are the bytes of the tensors that the real code would
hold (`LiveBytes` of benchmarks/memory.py); weights are left out, gradients go as they come; CPU kernels, no engine.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.memory import LiveBytes
from fastslow_scale.config import Config
from fastslow_scale.config_file import load_config
from fastslow_scale.parallel.cpu import install_cpu_shim
from fastslow_scale.parallel.mesh import Mesh, build_mesh
from fastslow_scale.plan.activations import activations
from fastslow_scale.plan.search import RECOMPUTE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--world-size", type=int, default=64)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    install_cpu_shim()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(options.world_size))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.world_size)
    print("| config | recompute | counted GB | predicted GB | predicted / counted |", "|---|---|---|---|---|", sep="\n")
    for path in options.configs:
        for recompute in RECOMPUTE:
            config = load_config(path, [f"train.recompute={recompute}"])
            counted, planned = count(config, build_mesh(config.parallel.tensor_parallel_size)), predict(config)
            cells = [path, recompute, f"{counted / 1e9:.3f}", f"{planned / 1e9:.3f}", f"{planned / counted:.3f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


def predict(config: Config) -> int:
    """The largest moment of `plan/memory.py`, without what the engine holds."""
    parts = activations(config, on_gpu=False)
    return parts.kept + max(parts.loss, parts.loss_gradients, parts.layer_backward)


def count(config: Config, mesh: Mesh) -> int:
    """Peak bytes beyond the weights, in the second of two rounds: what the first one leaves for good is in the plan too
    (`gather_buffer`), but not a part of `predict`."""
    from fastslow_scale.model.model import build_model

    with torch.device("meta"):
        model = build_model(config, mesh)
    shape = config.train.micro_batch_size, config.train.seq_length
    with FakeTensorMode(), LiveBytes() as live:
        give_weights(model)
        tokens = torch.empty(shape, dtype=torch.int64)
        for _ in range(2):
            before = live.now
            live.start_over()
            model(tokens, tokens).backward()
    return live.peak - before


def give_weights(model: nn.Module) -> None:
    """Fake ones in place of those on the meta device, with what megatron has noted on them."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if id(weight) not in made:
                fake = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
                made[id(weight)] = nn.Parameter(fake, requires_grad=weight.requires_grad)
                made[id(weight)].__dict__.update(weight.__dict__)
                made[id(weight)].register_post_accumulate_grad_hook(drop_gradient)
            setattr(module, name, made[id(weight)])


def drop_gradient(weight: torch.Tensor) -> None:
    weight.grad = None


if __name__ == "__main__":
    main()
