"""Peak memory of the head and its loss, forward and backward: in chunks of tokens, and with all logits at once.

    .venv/bin/python benchmarks/cross_entropy.py [--tokens N] [--vocab-size N] [--hidden-size N]

Each way runs in a process of its own. The peak is the kernel's (VmHWM, set back before the step) above what weights and
input took before. "One chunk" is the same code with a chunk of all tokens; "torch" is linear and cross_entropy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WAYS = ("chunks", "one chunk", "torch")


def measure(way: str, tokens: int, vocab_size: int, hidden_size: int) -> dict[str, float]:
    warnings.simplefilter("ignore")
    import torch
    import torch.nn.functional as F

    from fastslow_scale.model import loss as loss_module
    from fastslow_scale.parallel.mesh import single_process_mesh

    if way == "one chunk":
        loss_module.CHUNK_ELEMENTS = tokens * vocab_size
    vocabulary = loss_module.VocabularySlice(0, vocab_size, vocab_size, single_process_mesh().tp_group)

    def step(count: int) -> tuple[float, float]:
        g = torch.Generator().manual_seed(0)
        hidden = torch.randn(count, hidden_size, generator=g).requires_grad_()
        weight = (0.02 * torch.randn(vocab_size, hidden_size, generator=g)).requires_grad_()
        labels = torch.randint(0, vocab_size, (count,), generator=g)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        if way == "torch":
            loss = F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")
        else:
            loss = loss_module.cross_entropy_sum(hidden, weight, labels, vocabulary)
        (loss / count).backward()
        result["peak"] = resident("VmHWM") - before
        assert hidden.grad is not None and weight.grad is not None
        return loss.item(), (hidden.grad.double().norm() ** 2 + weight.grad.double().norm() ** 2).sqrt().item()

    result: dict[str, float] = {}
    step(16)
    start = time.process_time()
    result["loss"], result["gradient"] = step(tokens)
    return result | {"seconds": time.process_time() - start}


def resident(name: str) -> float:
    """A line of /proc/self/status, in MB (10^6 bytes)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = (options.tokens, options.vocab_size, options.hidden_size)
    if options.way:
        print(json.dumps(measure(options.way, *sizes)))
        return
    found = {}
    for way in WAYS:
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--way", way], capture_output=True, text=True, check=True
        )
        found[way] = json.loads(done.stdout.splitlines()[-1])
    print(f"{options.tokens} tokens, vocabulary {options.vocab_size}, hidden size {options.hidden_size}, fp32\n")
    print("| the loss step | peak / torch | peak, MB | CPU time / torch | summed loss | gradient norm |")
    print("|---|---|---|---|---|---|")
    base = found["torch"]
    for way, row in found.items():
        print(
            f"| {way} | {row['peak'] / base['peak']:.2f} | {row['peak']:.0f} "
            f"| {row['seconds'] / base['seconds']:.2f} | {row['loss']:.4f} | {row['gradient']:.8f} |"
        )


if __name__ == "__main__":
    main()
