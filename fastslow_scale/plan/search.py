"""Which layout is the fastest that fits, why the others lose, and what would help where none fits.

Tried: every tensor-parallel size that stays inside a node (with sequence parallelism), every ZeRO stage, recomputation
mode and micro-batch, as far as the config's rules allow them, and the config as it stands. The layout does not change
what is learned, so the fastest step wins; everything else in the config stays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pydantic import ValidationError

from data_pipeline.errors import UserError
from fastslow_scale.config import Config
from fastslow_scale.plan.machine import Machine
from fastslow_scale.plan.memory import Memory, memory
from fastslow_scale.plan.roofline import StepTime, step_time

Change = Mapping[str, Mapping[str, object]]

RECOMPUTE = ("none", "selective", "full")
MOST_NODES = 4096
SAME = 5e-4


@dataclass(frozen=True)
class Candidate:
    """One layout, what it needs and how long its step takes."""

    config: Config
    dp: int
    memory: Memory
    time: StepTime
    limit_bytes: float

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.limit_bytes

    @property
    def key(self) -> tuple[int, int, str]:
        """Layouts that differ in their micro-batch only share it."""
        parallel = self.config.parallel
        return parallel.tensor_parallel_size, parallel.zero_stage, self.config.train.recompute

    @property
    def name(self) -> str:
        tp, stage, recompute = self.key
        batch = self.config.train.micro_batch_size
        return f"TP {tp} x DP {self.dp}, ZeRO-{stage}, recompute {recompute}, micro-batch {batch}"


def judge(config: Config, machine: Machine, bucket_elements: int) -> Candidate:
    """Raises `UserError`: the config cannot run on so many ranks."""
    dp = config.data_parallel_size(machine.ranks)
    needs = memory(config, dp, bucket_elements, machine.on_gpu)
    return Candidate(config, dp, needs, step_time(config, machine, bucket_elements), machine.memory_bytes)


def ranked(config: Config, machine: Machine, bucket_elements: int) -> list[Candidate]:
    """The best micro-batch of each layout, best layout first: those that fit by their step, then by what they lack."""
    best: dict[tuple[int, int, str], Candidate] = {}
    for changed in itertools.chain([config], _layouts(config, machine)):
        try:
            candidate = judge(changed, machine, bucket_elements)
        except UserError:
            continue
        if candidate.key not in best or _order(candidate) < _order(best[candidate.key]):
            best[candidate.key] = candidate
    return sorted(best.values(), key=_order)


def largest_micro_batch(config: Config, machine: Machine, bucket_elements: int) -> int | None:
    """The largest that fits with the rest of the config as it is and divides the global batch, or None."""
    share = config.train.global_batch_size * config.parallel.tensor_parallel_size // machine.ranks
    for size in reversed(_divisors(share)):
        changed = _changed(config, {"train": {"micro_batch_size": size}})
        if changed and judge(changed, machine, bucket_elements).fits:
            return size
    return None


def why_it_lost(candidate: Candidate, winner: Candidate) -> str:
    """One reason: bytes that it lacks, or the cause whose seconds differ most from the winner's."""
    if not candidate.fits:
        lacking = (candidate.memory.peak - candidate.limit_bytes) / 1e9
        return f"does not fit: {lacking:.1f} GB too much at its {candidate.memory.peak_moment}"
    slower = candidate.time.seconds / winner.time.seconds - 1
    if slower < SAME:
        return f"as fast, with {candidate.memory.peak / 1e9:.1f} GB"
    own, other = candidate.time.parts, winner.time.parts
    cause = max(own, key=lambda part: own[part] - other.get(part, 0.0))
    more = own[cause] - other.get(cause, 0.0)
    return f"{slower:.1%} slower, most of it {cause} (+{more:.3g} s a step)"


def what_would_help(config: Config, machine: Machine, bucket_elements: int) -> list[str]:
    """For a config that does not fit: single changes that would make it fit, then more nodes or more memory."""
    own = judge(config, machine, bucket_elements)
    changes: list[Change] = [
        *({"train": {"recompute": mode}} for mode in RECOMPUTE[RECOMPUTE.index(config.train.recompute) + 1 :]),
        *({"parallel": {"zero_stage": stage}} for stage in range(config.parallel.zero_stage + 1, 4)),
        {"train": {"recompute": "full"}, "parallel": {"zero_stage": 3}},
        {"train": {"recompute": "full", "micro_batch_size": 1}, "parallel": {"zero_stage": 3}},
    ]
    lines = []
    for change in changes:
        changed = _changed(config, change)
        if changed and judge(changed, machine, bucket_elements).fits:
            words = " ".join(
                f"{section}.{key}={value}" for section, keys in change.items() for key, value in keys.items()
            )
            lines.append(f"fits with {words}")
    best = ranked(config, machine, bucket_elements)
    if best and best[0].fits:
        lines.append(f"fits as {best[0].name}")
    else:
        lines += _more_nodes(config, machine, bucket_elements)
        least = min([own, *best], key=lambda candidate: candidate.memory.peak)
        lines.append(f"fits in ranks with {least.memory.peak / 1e9:.1f} GB for tensors, as {least.name}")
    return lines


def _more_nodes(config: Config, machine: Machine, bucket_elements: int) -> list[str]:
    """The first number of nodes that does; of those that the global batch allows, each at least half as many again."""
    nodes = machine.nodes
    while nodes < MOST_NODES:
        least = nodes + max(1, nodes // 2)
        nodes = next((n for n in range(least, MOST_NODES + 1) if _divide(config, machine, n)), MOST_NODES)
        found = ranked(config, replace(machine, nodes=nodes), bucket_elements)
        if found and found[0].fits:
            return [f"fits on {nodes} nodes, as {found[0].name}"]
    return [f"fits on no number of nodes tried up to {MOST_NODES}"]


def _divide(config: Config, machine: Machine, nodes: int) -> bool:
    """Whether so many nodes can share the global batch at some tensor-parallel size inside a node."""
    per_node = machine.ranks_per_node
    return any(config.train.global_batch_size * tp % (nodes * per_node) == 0 for tp in _divisors(per_node))


def _layouts(config: Config, machine: Machine) -> Iterator[Config]:
    for tp in _divisors(machine.ranks_per_node):
        share = config.train.global_batch_size * tp // machine.ranks
        for stage in range(4):
            for recompute in RECOMPUTE:
                for batch in _divisors(share):
                    parallel = {"tensor_parallel_size": tp, "sequence_parallel": tp > 1, "zero_stage": stage}
                    train = {"micro_batch_size": batch, "recompute": recompute}
                    changed = _changed(config, {"parallel": parallel, "train": train})
                    if changed:
                        yield changed


def _divisors(number: int) -> list[int]:
    """In rising order; of 0 none."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _changed(config: Config, change: Change) -> Config | None:
    """The config with these keys, or None where its rules forbid that."""
    tree = config.model_dump()
    for section, keys in change.items():
        tree[section].update(keys)
    try:
        return Config.model_validate(tree)
    except ValidationError:
        return None


def _order(candidate: Candidate) -> tuple[bool, float]:
    return not candidate.fits, candidate.time.seconds if candidate.fits else candidate.memory.peak
