"""Causal grouped-query attention with rotary positions, on megatron's sequence-first layout."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from fastslow_scale.model.init import InitScheme
from fastslow_scale.model.linear import Linears
from fastslow_scale.model.window import Cut, Masks, windowed_attention

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int | None], torch.Tensor]
"""What `causal_attention` is: (q, k, v, window) -> [B, H, T, head_dim]. Decoding has its own, over cached keys."""


def rope_table(length: int, head_dim: int, theta: float, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of t * theta^(-2i/head_dim) for positions t (arXiv 2104.09864), both [length, 1, 1, 1, head_dim].

    The two halves of a head rotate together (Llama's half-split order), so each row holds its angles twice.
    Angles are taken in fp64 and rounded once, to the dtype of `like`.
    """
    i = torch.arange(0, head_dim, 2, dtype=torch.float64, device=like.device)
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device=like.device), theta ** (-i / head_dim))
    angles = torch.cat([angles, angles], dim=-1)[:, None, None, None, :]
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate [T, B, G, heads, head_dim] by each token's angles: x cos + (-x2, x1) sin."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def queries_keys_values(
    qkv: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], queries_per_group: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `Attention.qkv_proj` gives, apart and rotated: [T, B, features] -> [B, H, T, d] and twice [B, G, T, d]."""
    length, batch, _ = qkv.shape
    grouped = qkv.view(length, batch, -1, queries_per_group + 2, head_dim)
    # One split: the backward of slices would fill and add up a tensor of zeros for each of them.
    q, k, v = grouped.split([queries_per_group, 1, 1], dim=3)
    q, k = rotate(q, rope), rotate(k, rope)
    return q.flatten(2, 3).permute(1, 2, 0, 3), k.squeeze(3).permute(1, 2, 0, 3), v.squeeze(3).permute(1, 2, 0, 3)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) v, where token t sees tokens (t - window, t] or [0, t].

    Args:
        q: [B, H, T, head_dim].
        k, v: [B, G, T, head_dim], G key-value heads, each serving H / G query heads.
        window: tokens seen, itself included; None for all.

    Returns:
        [B, H, T, head_dim].
    """
    length, heads, groups = q.shape[2], q.shape[1], k.shape[1]
    if window is None or window >= length:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != groups)
    cut = Cut(length, window)
    return windowed_attention(q, k, v, cut, Masks.of(cut, heads // groups, like=q))


class Attention(nn.Module):
    """O(attn(rope(QKV(x)))). One fused projection makes queries, keys and values.

    The rows of qkv_proj are ordered by key-value head g: its H/G query heads, its key head, its value head. A
    contiguous slice of rows is therefore whole heads for every tensor-parallel size that divides G.
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        window: int | None,
        linears: Linears,
        init: InitScheme,
    ):
        super().__init__()
        self.head_dim = hidden_size // num_attention_heads
        self.queries_per_group = num_attention_heads // num_key_value_heads
        self.window = window
        self.prepare = queries_keys_values
        qkv_features = (num_attention_heads + 2 * num_key_value_heads) * self.head_dim
        self.qkv_proj = linears.column(
            hidden_size, qkv_features, init.weight(f"{name}.qkv_proj.weight", fan_in=hidden_size)
        )
        self.o_proj = linears.row(
            hidden_size, hidden_size, init.output_weight(f"{name}.o_proj.weight", fan_in=hidden_size)
        )

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[T, B, D] -> [T, B, D]; under sequence parallelism both are this rank's T / tp tokens."""
        return self.o_proj(self.core(self.qkv_proj(x), rope))

    def core(
        self, qkv: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attend: Attend = causal_attention
    ) -> torch.Tensor:
        """What lies between the projections: [T, B, qkv features of this rank] -> [T, B, heads * head_dim]."""
        q, k, v = self.prepare(qkv, rope, self.queries_per_group, self.head_dim)
        out = attend(q, k, v, self.window)
        return out.permute(2, 0, 1, 3).flatten(2)
