"""Checks that a layout's promises hold: declarations at start-up, equal replicas while training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from fastslow_scale.parallel.mesh import Mesh
from fastslow_scale.parallel.sharing import sharded_dim

SHARDED_WEIGHTS = {"qkv_proj": 0, "gate_up_proj": 0, "embed_tokens": 0, "lm_head": 0, "o_proj": 1, "down_proj": 1}


class ReplicasDiffer(RuntimeError):
    """Weights or states that must be equal are not: training on would only spread the damage."""


def check_declarations(model: nn.Module) -> None:
    """Every sharded weight of the fast path declares its cut dimension, and nothing else declares any.

    A weight without its declaration would count tp_size times too little in the gradient norm, and be saved as whole.

    Raises:
        AssertionError: naming the parameter.
    """
    for name, param in model.named_parameters():
        owner = name.removesuffix(".weight").rsplit(".", 1)[-1]
        expected = None if name.startswith("exchanges.") else SHARDED_WEIGHTS.get(owner)
        assert sharded_dim(param) == expected, f"{name} declares dimension {sharded_dim(param)}, not {expected}"
        assert getattr(param, "partition_stride", 1) == 1, f"{name} is cut in strides"


def difference(named: Iterable[tuple[str, torch.Tensor]], group: dist.ProcessGroup, across: str) -> str | None:
    """Name the first tensor that differs between the ranks of `group`, and the ranks that differ from the first one.

    A collective: every rank of the group gives the same names in the same order. One small all-gather in all.
    """
    pairs = list(named)
    if not pairs or group.size() == 1:
        return None
    mine = torch.stack([digest(tensor) for _, tensor in pairs])
    everyone = mine.new_empty(group.size(), *mine.shape)
    dist.all_gather_into_tensor(everyone.flatten(0, 1), mine, group=group)
    differs = (everyone != everyone[0]).any(-1)
    if not differs.any():
        return None
    first = int(differs.any(0).nonzero()[0])
    ranks = dist.get_process_group_ranks(group)
    odd = [ranks[i] for i in range(len(ranks)) if bool(differs[i, first])]
    return f"{pairs[first][0]} differs over {across} ranks: {odd} from {ranks[0]}"


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Two 64-bit sums over a tensor's bits, one weighted by place, int64 [2]; any single changed bit changes both."""
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
    padding = -bits.numel() % 4
    words = (nn.functional.pad(bits, (0, padding)) if padding else bits).view(torch.int32).to(torch.int64)
    places = torch.arange(1, words.numel() + 1, device=words.device)
    return torch.stack([words.sum(), (words * (2 * places + 1)).sum()])


def check_training_state(weights: Mapping[str, nn.Parameter], states: Mapping[str, torch.Tensor], mesh: Mesh) -> None:
    """Stop where replicas differ; a collective of all ranks.

    Replicated weights and slow states must be equal over tensor-parallel ranks, all weights over data-parallel ones.
    Under ZeRO-3 a rank holds its own part of each weight, which is compared over tensor-parallel ranks only.

    Raises:
        ReplicasDiffer: on every rank, naming the first tensor of each group of ranks that differs.
    """
    partitioned = any(hasattr(p, "ds_tensor") for p in weights.values())
    held = {name: getattr(p, "ds_tensor", p) for name, p in weights.items()}
    replicated = [(name, held[name]) for name, p in weights.items() if sharded_dim(p) is None]
    found = [difference([*replicated, *states.items()], mesh.tp_group, "tensor-parallel")]
    if not partitioned:
        found.append(difference(held.items(), mesh.dp_group, "data-parallel"))
    # A rank that stopped alone would leave the others waiting.
    failed = torch.tensor(float(any(found)), device=mesh.device)
    dist.all_reduce(failed)
    if failed:
        everyone: list[list[str | None]] = [[] for _ in range(mesh.world_size)]
        dist.all_gather_object(everyone, found)
        raise ReplicasDiffer("; ".join(sorted({text for rank in everyone for text in rank if text})))
