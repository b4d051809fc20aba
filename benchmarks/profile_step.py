"""Where the CPU time of a training step goes, by kind of operation: configs/tiny.yaml on one rank, dense and coupled.

    .venv/bin/python -m benchmarks.profile_step [--steps N] [section.key=value ...]

The steps are the trainer's own, through DeepSpeed, on the data of `fastslow data demo --output data/demo`, on one
thread. Each operator is measured by the thread's CPU clock, which stands still while other programs run; torch's
profiler reads the wall clock. The measuring itself costs time outside of the operators. So "Python and autograd" is the
CPU time of the same steps when nothing is measured, less that of the operators.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastslow_scale.launch.local import launch
from fastslow_scale.train.timeline import Timeline

CONFIG = Path(__file__).parent.parent / "configs" / "tiny.yaml"
VARIANTS = ("dense", "coupled")
WARMUP_STEPS = 2
LOSS = "loss"
REST = "Python and autograd"
KINDS = {
    "matrix products": "of the layers",
    "attention": "scaled_dot_product_attention",
    "RMSNorm": "where it is one kernel, on GPUs",
    "other elementwise": "norms on CPUs, SwiGLU, rotary positions, residual sums, sums over tokens, pool and spread",
    "copies": "layout changes, concatenations, padding",
    "embedding": "",
    "cross-entropy": "the head's matrix products included",
    "AdamW": "",
    "engine": "DeepSpeed: gradients to and from its buffers, norm, clipping",
    "communication": "collectives, on the one rank",
    REST: "all time outside of operators",
}
PRODUCTS = {"mm", "addmm", "bmm"}
COPIES = set("copy_ cat stack clone constant_pad_nd fill_ zero_ zeros slice_backward select_backward _to_copy".split())


def kind_of(operator: str, namespace: str, part: str, node: str | None) -> str:
    """The kind of an operator: `part` of the step that runs it, and in the backward the autograd node."""
    if namespace == "c10d":
        return "communication"
    if part == LOSS or (node or "").startswith("_CrossEntropySum"):
        return "cross-entropy"
    if operator.startswith("_fused_adam"):
        return "AdamW"
    outside_of_the_graph = part == "backward" and node is None
    if part == "optimizer" or outside_of_the_graph or "AccumulateGrad" in (node or ""):
        return "engine"
    if operator in PRODUCTS:
        return "matrix products"
    if "scaled_dot_product" in operator:
        return "attention"
    if "rms_norm" in operator or "RmsNorm" in (node or ""):
        return "RMSNorm"
    if "embedding" in operator or "Index" in (node or "") or operator == "index":
        return "embedding"
    return "copies" if operator in COPIES else "other elementwise"


class OperatorClock(TorchDispatchMode):
    """Seconds of the thread's CPU time of each operator, by (kind, name), while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [""]
        self.spent: defaultdict[tuple[str, str], float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        started = time.thread_time()
        out = func(*args, **(kwargs or {}))
        spent = time.thread_time() - started
        node = torch._C._current_autograd_node()
        namespace, name = func._schema.name.split("::")
        kind = kind_of(name, namespace, self.parts[-1], node.name() if node else None)
        self.spent[kind, name] += spent
        return out

    @contextlib.contextmanager
    def inside(self, part: str) -> Iterator[None]:
        self.parts.append(part)
        try:
            yield
        finally:
            self.parts.pop()


class Parts(Timeline):
    """Tells the clock which part of the step runs."""

    def __init__(self, clock: OperatorClock):
        super().__init__(torch.device("cpu"))
        self._clock = clock

    def part(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self._clock.inside(name)


def measure(variant: str, overrides: list[str], steps: int, result: Path) -> None:
    """In the environment of a rank: leave the shares of each kind, and the operators of each, in `result`."""
    import warnings

    warnings.filterwarnings("ignore")
    from fastslow_scale.config_file import load_config
    from fastslow_scale.parallel.mesh import single_process_mesh, stop_process_group
    from fastslow_scale.train.loop import Trainer, agreed_signal

    torch.set_num_threads(1)
    fixed = ["parallel.tensor_parallel_size=1", "parallel.sequence_parallel=false", f"model.variant={variant}"]
    config = load_config(str(CONFIG), [*fixed, f"train.run_dir={result.parent}", *overrides])
    trainer, clock = Trainer(config, single_process_mesh()), OperatorClock()
    trainer.engine.timeline = Parts(clock)
    head = trainer.engine.model.lm_head
    head.register_forward_pre_hook(lambda *_: clock.parts.append(LOSS))
    head.register_forward_hook(lambda *_: clock.parts.pop() and None)
    batches = trainer.batches()

    def step() -> float:
        rows = next(batches)
        started = time.thread_time()
        trainer.train_step(rows)
        agreed_signal(0, trainer.mesh)
        return time.thread_time() - started

    for _ in range(WARMUP_STEPS):
        step()
    total = 0.0
    for _ in range(steps):
        total += step()
        with clock:
            step()
    spent: defaultdict[str, float] = defaultdict(float)
    for (kind, _), seconds in clock.spent.items():
        spent[kind] += seconds
    spent[REST] = total - sum(spent.values())
    most = sorted(clock.spent, key=lambda key: -clock.spent[key])
    names = {kind: [(name, clock.spent[k, name] / total) for k, name in most if k == kind][:5] for kind in KINDS}
    shares = {kind: spent[kind] / total for kind in KINDS}
    result.write_text(json.dumps({"shares": shares, "ms": total / steps * 1e3, "operators": names}))
    stop_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rank", nargs=2, metavar=("VARIANT", "RESULT"), help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if options.rank:
        measure(options.rank[0], options.overrides, options.steps, Path(options.rank[1]))
        return
    found = {}
    for variant in VARIANTS:
        with tempfile.TemporaryDirectory(prefix="profile_") as name:
            result = Path(name) / "result.json"
            arguments = [*options.overrides, "--steps", str(options.steps), "--rank", variant, str(result)]
            if launch(1, "benchmarks.profile_step", arguments):
                sys.exit(1)
            found[variant] = json.loads(result.read_text())
    print(f"{options.steps} steps, one thread\n")
    print("| share of a step's CPU time | " + " | ".join(VARIANTS) + " | what |\n|---|" + "---|" * (len(VARIANTS) + 1))
    for kind, what in KINDS.items():
        print(f"| {kind} | " + " | ".join(f"{found[v]['shares'][kind]:.1%}" for v in VARIANTS) + f" | {what} |")
    print("| together | " + " | ".join(f"{sum(found[v]['shares'].values()):.1%}" for v in VARIANTS) + " | |")
    print("| ms of CPU time a step | " + " | ".join(f"{found[v]['ms']:.0f}" for v in VARIANTS) + " | |\n")
    for variant in VARIANTS:
        print(f"{variant}, the operators that took most of each kind:")
        for kind, names in found[variant]["operators"].items():
            if names:
                print(f"  {kind}: " + ", ".join(f"{name} {share:.1%}" for name, share in names))


if __name__ == "__main__":
    main()
