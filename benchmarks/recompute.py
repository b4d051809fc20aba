"""Peak memory and time of one step for each recomputation mode, each in a process of its own.

python benchmarks/recompute.py
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
import warnings

MODES = ("none", "selective", "full")
SHAPE = {
    "model": {
        "vocab_size": 4096,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    },
    "slow": {"pool_size": 8, "exchange_after": [4], "num_layers": 2},
    "train": {"seq_length": 512, "micro_batch_size": 4, "global_batch_size": 4, "max_steps": 1},
}


def measure(mode: str) -> dict[str, float]:
    warnings.simplefilter("ignore")
    import torch

    from fastslow_scale.config import Config
    from fastslow_scale.model.model import build_model
    from fastslow_scale.parallel.mesh import single_process_mesh

    tree = {name: dict(section) for name, section in SHAPE.items()}
    tree["train"]["recompute"] = mode
    config = Config.model_validate(tree)
    model = build_model(config, single_process_mesh()).to("cuda" if torch.cuda.is_available() else "cpu")
    device = next(model.parameters()).device
    tokens = torch.randint(0, 4096, (4, 512), generator=torch.Generator().manual_seed(0)).to(device)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.perf_counter()
    loss = model(tokens, tokens)
    loss.backward()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - held
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    return {"loss": loss.item(), "megabytes": peak / 1e6, "seconds": seconds}


def main() -> None:
    print("| recompute | peak above weights and gradients, MB | seconds | summed loss |", "|---|---|---|---|", sep="\n")
    for mode in MODES:
        done = subprocess.run([sys.executable, __file__, mode], capture_output=True, text=True, check=True)
        result = json.loads(done.stdout.splitlines()[-1])
        print(f"| {mode} | {result['megabytes']:.0f} | {result['seconds']:.2f} | {result['loss']:.6f} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
    else:
        main()
