"""AdamW (arXiv 1711.05101) and its parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastslow_scale.config import Config


def parameter_groups(model: nn.Module, config: Config) -> list[dict[str, Any]]:
    """Group the trainable parameters by how they are updated.

    fast / slow: the slow path has its own learning-rate multiplier and eps (its gradients are tiny while the gate is
    small, and an eps above them would hold the gate closed); matrices decay, norms do not. Gates never decay.
    Each group carries `name` and `lr_multiplier`; the trainer sets `lr` = schedule x lr_multiplier before each step.
    """
    slow, optimizer = config.slow, config.optimizer
    multiplier = {"fast": 1.0, "slow": slow.lr_multiplier, "gate": slow.gate_lr_multiplier}
    groups: dict[str, dict[str, Any]] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        part = "fast" if not name.startswith("exchanges.") else "gate" if name.endswith(".gate") else "slow"
        decays = part != "gate" and param.ndim > 1
        key = f"{part}.decay" if decays else f"{part}.no_decay"
        group = groups.setdefault(
            key,
            {
                "name": key,
                "params": [],
                "lr": optimizer.lr * multiplier[part],
                "lr_multiplier": multiplier[part],
                "eps": optimizer.eps if part == "fast" else slow.eps,
                "weight_decay": optimizer.weight_decay if decays else 0.0,
            },
        )
        group["params"].append(param)
    return list(groups.values())


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """torch's own AdamW with its fused kernel, which DeepSpeed shards as a client optimizer."""
    return torch.optim.AdamW(parameter_groups(model, config), betas=config.optimizer.betas, fused=True)
