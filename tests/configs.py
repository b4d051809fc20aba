"""Small configs for tests, as a few changed keys of one base."""

from __future__ import annotations

from typing import Any

from fastslow_scale.config import Config

BASE: dict[str, dict[str, Any]] = {
    "model": {
        "vocab_size": 61,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_multiple": 8,
    },
    "slow": {"pool_size": 4, "exchange_after": [1, 2], "num_layers": 1, "num_attention_heads": 2},
    "optimizer": {"lr": 1e-3, "eps": 1e-5, "grad_clip": 0.1},
    "train": {"seq_length": 18, "micro_batch_size": 2, "global_batch_size": 8, "max_steps": 20},
}


def small_config(**changes: dict[str, Any]) -> Config:
    """`small_config(model={"variant": "dense"})`: the base with some keys of some sections changed."""
    tree = {name: dict(section) for name, section in BASE.items()}
    for name, section in changes.items():
        tree.setdefault(name, {}).update(section)
    return Config.model_validate(tree)
