"""Counts every collective of a stretch of code: by group, by kind, calls and bytes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fastslow_scale.parallel.mesh import Mesh

KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "barrier": "barrier",
}


@dataclass(frozen=True)
class Traffic:
    """Calls, and the bytes of the whole message: what is reduced, or what an all-gather or reduce-scatter spans."""

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.calls * times, self.bytes * times)


Entries = dict[tuple[str, str], Traffic]
"""(group, kind) -> traffic; groups are "tp", "dp", "world", kinds the values of KINDS."""


class Ledger(TorchDispatchMode):
    """`with Ledger(mesh) as ledger:` records what this rank takes part in, the backward's collectives included.

    It sees the operations that torch hands to the process group, so megatron's and DeepSpeed's are counted as well as
    this project's own. Collectives of a group of one rank move nothing and are left out.
    """

    def __init__(self, mesh: Mesh):
        super().__init__()
        self._names = {mesh.dp_group.group_name: "dp", mesh.tp_group.group_name: "tp"}
        self._sizes = {"dp": mesh.dp_size, "tp": mesh.tp_size, "world": mesh.world_size}
        self._world = dist.group.WORLD.group_name  # type: ignore[union-attr]
        self._counted: defaultdict[tuple[str, str], Traffic] = defaultdict(Traffic)

    @property
    def entries(self) -> Entries:
        return dict(self._counted)

    def lines(self) -> list[str]:
        """`tp all_gather: 28 calls, 10.5 MB` for each group and kind."""
        return [
            f"{group} {kind}: {traffic.calls} calls, {traffic.bytes / 1e6:,.6g} MB"
            for (group, kind), traffic in sorted(self._counted.items())
        ]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._opname in KINDS:
            group = self._group(args)
            if self._sizes.get(group, 2) > 1:
                kind = KINDS[func._opname]
                self._counted[group, kind] += Traffic(1, _largest(args))
        return func(*args, **(kwargs or {}))

    def _group(self, args: Any) -> str:
        for value in args:
            if isinstance(value, torch.ScriptObject):
                try:
                    name = dist.ProcessGroup.unbox(value).group_name
                except RuntimeError:
                    continue  # the reduction, such as sum, is a script object too
                return "world" if name == self._world else self._names.get(name, "other")
        return "other"


def _largest(args: Any) -> int:
    """Bytes of the larger side: an all-gather's output, a reduce-scatter's input, what an all-reduce reduces."""
    return max((_bytes(value) for value in args), default=0)


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(item) for item in value) if isinstance(value, list | tuple) else 0
