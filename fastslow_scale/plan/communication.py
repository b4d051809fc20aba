"""Which bytes cross which link, and how long that takes.

Bytes are those of `model/communication.py`, which the ledger's test holds to the byte. Two things are added here:

- what recomputation repeats, per fast layer and micro-batch: the all-gathers before both column maps and the one
  reduce-scatter (or all-reduce, without sequence parallelism) after attention. The one after the MLP is not repeated:
  recomputation ends with the last tensor that the backward needs.
- an ESTIMATE for ZeRO-3, which decides at run time: each micro-batch gathers the weights for the forward, again for
  the backward those that were not kept, and scatters the gradients.

Ranks are numbered with tensor parallel innermost (`parallel/mesh.py`): a tensor-parallel group is tp neighbours, a
data-parallel group takes every tp-th rank.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from fastslow_scale.config import Config
from fastslow_scale.model.communication import step_traffic
from fastslow_scale.parallel.ledger import Entries, Traffic
from fastslow_scale.plan.activations import FP32, element_bytes
from fastslow_scale.plan.engine_state import PERSISTENT_ELEMENTS, REUSE_ELEMENTS
from fastslow_scale.plan.machine import LATENCY_SECONDS, Machine
from fastslow_scale.plan.parameters import optimizer_groups, rank_weights


@dataclass(frozen=True)
class Group:
    """Where the ranks of a kind of group sit.

    Attributes:
        size: ranks.
        inside: of them on one node.
        side_by_side: groups that share a node, and with it the node's network.
    """

    name: str
    size: int
    inside: int
    side_by_side: int

    @property
    def crosses(self) -> bool:
        return self.size > self.inside

    @property
    def link(self) -> str:
        return "network" if self.crosses else "link inside the node"


def groups_of(machine: Machine, tp: int) -> dict[str, Group]:
    """tp, dp and world on this machine."""
    node, ranks = machine.ranks_per_node, machine.ranks
    tp_inside = math.gcd(node, tp)  # where some groups straddle nodes, those are the slowest
    dp_inside = max(1, min(node, ranks) // tp)
    return {
        "tp": Group("tp", tp, tp_inside, max(1, node // tp)),
        "dp": Group("dp", ranks // tp, dp_inside, min(tp, node)),
        "world": Group("world", ranks, min(node, ranks), 1),
    }


def planned_traffic(config: Config, dp: int, bucket_elements: int) -> Entries:
    """One rank's collectives of one optimizer step; an estimate with ZeRO-3."""
    total: defaultdict[tuple[str, str], Traffic] = defaultdict(Traffic)
    micro_batches = config.gradient_accumulation_steps(dp)
    counted = config
    if config.parallel.zero_stage == 3:
        counted = config.model_copy(update={"parallel": config.parallel.model_copy(update={"zero_stage": 2})})
    for (group, kind), traffic in step_traffic(counted, optimizer_groups(config), dp, bucket_elements).items():
        # ZeRO-2's own traffic between data-parallel ranks makes room for ZeRO-3's.
        if not (config.parallel.zero_stage == 3 and group == "dp"):
            total[group, kind] += traffic
    if config.parallel.zero_stage == 3 and dp > 1:
        for key, traffic in _zero3_traffic(config).items():
            total[key] += traffic * micro_batches
    for key, traffic in recomputed_traffic(config).items():
        total[key] += traffic * micro_batches
    return dict(total)


def recomputed_traffic(config: Config) -> Entries:
    """What `train.recompute=full` moves again in each micro-batch."""
    tp, train, model = config.parallel.tensor_parallel_size, config.train, config.model
    if tp == 1 or train.recompute != "full":
        return {}
    sequence = config.parallel.sequence_parallel
    length = -(-train.seq_length // tp) * tp if sequence else train.seq_length
    stream = Traffic(1, length * train.micro_batch_size * model.hidden_size * element_bytes(config))
    if not sequence:
        return {("tp", "all_reduce"): stream * model.num_hidden_layers}
    return {
        ("tp", "all_gather"): stream * (2 * model.num_hidden_layers),
        ("tp", "reduce_scatter"): stream * model.num_hidden_layers,
    }


def _zero3_traffic(config: Config) -> Entries:
    own, element = rank_weights(config), element_bytes(config)
    cut = [size for size in own if size >= PERSISTENT_ELEMENTS]
    again = max(0, sum(cut) - REUSE_ELEMENTS // 2)
    return {
        ("dp", "all_gather"): Traffic(2 * len(cut) if again else len(cut), (sum(cut) + again) * element),
        ("dp", "reduce_scatter"): Traffic(len(own), sum(own) * FP32),
    }


def seconds(kind: str, traffic: Traffic, group: Group, machine: Machine) -> float:
    """Of `traffic` on rings: an all-reduce passes 2 (n-1)/n of the message over each link, the others (n-1)/n.

    Where a group crosses nodes, each of the groups side by side sends that much through the node's network.
    """
    if group.size == 1:
        return 0.0
    passed = (2 if kind == "all_reduce" else 1) * (group.size - 1) / group.size * traffic.bytes
    bus = machine.efficiency.bus
    slowest = passed / (machine.link_bytes_per_second * bus) if group.inside > 1 else 0.0
    if group.crosses:
        slowest = max(slowest, passed * group.side_by_side / (machine.network_bytes_per_second * bus))
    return slowest + traffic.calls * LATENCY_SECONDS
