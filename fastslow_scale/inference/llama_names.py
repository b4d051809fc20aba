"""The model's weights under Llama's names, and back: fused projections split, padding of the vocabulary removed.

here                                     there
layers.I.self_attn.qkv_proj.weight       model.layers.I.self_attn.{q,k,v}_proj.weight
layers.I.mlp.gate_up_proj.weight         model.layers.I.mlp.{gate,up}_proj.weight
lm_head.weight                           lm_head.weight
anything else, exchanges included        model.(the same)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from fastslow_scale.config import Config

Tensors = dict[str, torch.Tensor]

EXPORTED_MODEL_NAME = "sentencepiece.model"
"""Not tokenizer.model: transformers would make a tokenizer of its own of that, which gives other ids."""

QKV, GATE_UP = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


def sources(name: str) -> list[str]:
    """Llama's names of what the parameter `name` consists of, in the order that `fuse` takes them."""
    for fused, parts in ((QKV, ("q", "k", "v")), (GATE_UP, ("gate", "up"))):
        if name.endswith(fused):
            before = name.removesuffix(fused) + fused.split(".")[0]
            return [f"model.{before}.{part}_proj.weight" for part in parts]
    return [name if name == "lm_head.weight" else f"model.{name}"]


def split(name: str, weight: torch.Tensor, config: Config) -> Tensors:
    """A whole parameter -> the same weights under Llama's names."""
    parts = [weight]
    if name.endswith(QKV):
        heads, groups = _heads(name, config)
        per = heads // groups
        rows = weight.unflatten(0, (groups, per + 2, -1))
        parts = [part.flatten(0, 2) for part in (rows[:, :per], rows[:, per : per + 1], rows[:, per + 1 :])]
    elif name.endswith(GATE_UP):
        groups = _mlp_groups(name, weight.shape[0] // 2, config)
        parts = [part.flatten(0, 1) for part in weight.unflatten(0, (groups, 2, -1)).unbind(1)]
    elif name in VOCABULARY:
        parts = [weight[: config.model.vocab_size]]
    return {there: part.contiguous() for there, part in zip(sources(name), parts, strict=True)}


def fuse(name: str, tensors: Mapping[str, torch.Tensor], config: Config) -> torch.Tensor:
    """What `split` undoes: the whole parameter, its padding of the vocabulary zero."""
    parts = [tensors[there] for there in sources(name)]
    if name.endswith(QKV):
        heads, groups = _heads(name, config)
        head_dim = parts[0].shape[0] // heads
        return torch.cat([part.unflatten(0, (groups, -1, head_dim)) for part in parts], 1).flatten(0, 2)
    if name.endswith(GATE_UP):
        groups = _mlp_groups(name, parts[0].shape[0], config)
        return torch.stack([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 2)
    if name in VOCABULARY:
        return F.pad(parts[0], (0, 0, 0, config.model.padded_vocab_size - config.model.vocab_size))
    return parts[0]


def _heads(name: str, config: Config) -> tuple[int, int]:
    """Query heads and key-value heads of the layer that the weight belongs to."""
    section = config.slow if re.match(r"exchanges\.", name) else config.model
    heads, groups = section.num_attention_heads, section.num_key_value_heads
    assert heads and groups, "filled by Config"
    return heads, groups


def _mlp_groups(name: str, intermediate_size: int, config: Config) -> int:
    """How many groups of gate rows and up rows follow each other (see `model.layers.MLP`)."""
    return math.gcd(intermediate_size, _heads(name, config)[1])
