"""The decoder layer (Llama's, arXiv 2302.13971), for both paths: the fast one cut over ranks, the slow one whole."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastslow_scale.model.attention import Attend, Attention, causal_attention
from fastslow_scale.model.init import InitScheme
from fastslow_scale.model.linear import Linears
from fastslow_scale.model.norm import RMSNorm

Rope = tuple[torch.Tensor, torch.Tensor]
Recompute = Literal["none", "selective", "full"]


def swiglu(gate_up: torch.Tensor, num_groups: int) -> torch.Tensor:
    """silu(gate) * up of features that come in groups of gate, then up: [T, B, 2 F] -> [T, B, F]."""
    gate, up = gate_up.unflatten(-1, (num_groups, 2, -1)).unbind(-2)
    return (F.silu(gate) * up).flatten(-2)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202), gate and up as one fused projection.

    The rows of gate_up_proj come in gcd(intermediate_size, num_key_value_heads) groups: gate rows, then up rows.
    A contiguous slice of rows is therefore whole groups for every tensor-parallel size that divides both.
    """

    def __init__(
        self, name: str, hidden_size: int, intermediate_size: int, kv_heads: int, linears: Linears, init: InitScheme
    ):
        super().__init__()
        self.num_groups = math.gcd(intermediate_size, kv_heads) // linears.tp_size
        self.activate = swiglu
        self.gate_up_proj = linears.column(
            hidden_size, 2 * intermediate_size, init.weight(f"{name}.gate_up_proj.weight", fan_in=hidden_size)
        )
        self.down_proj = linears.row(
            intermediate_size, hidden_size, init.output_weight(f"{name}.down_proj.weight", fan_in=intermediate_size)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.core(self.gate_up_proj(x)))

    def core(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, B, 2 F] -> [T, B, F]."""
        return self.activate(gate_up, self.num_groups)


class Layer(nn.Module):
    """x += O(attn(rope(QKV(norm(x))))) ; x += down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        rms_norm_eps: float,
        window: int | None,
        recompute: Recompute,
        dtype: torch.dtype,
        linears: Linears,
        init: InitScheme,
    ):
        super().__init__()
        self.recompute = recompute
        self.input_layernorm = RMSNorm(hidden_size, rms_norm_eps, dtype, linears.norm_group)
        self.self_attn = Attention(
            f"{name}.self_attn", hidden_size, num_attention_heads, num_key_value_heads, window, linears, init
        )
        self.post_attention_layernorm = RMSNorm(hidden_size, rms_norm_eps, dtype, linears.norm_group)
        self.mlp = MLP(f"{name}.mlp", hidden_size, intermediate_size, num_key_value_heads, linears, init)

    def forward(self, x: torch.Tensor, rope: Rope, attend: Attend = causal_attention) -> torch.Tensor:
        """[T, B, D] -> [T, B, D], or this rank's T / tp tokens under sequence parallelism."""
        if self.recompute == "full" and torch.is_grad_enabled():
            return checkpoint(self._body, x, rope, attend, use_reentrant=False, preserve_rng_state=False)
        return self._body(x, rope, attend)

    def _body(self, x: torch.Tensor, rope: Rope, attend: Attend) -> torch.Tensor:
        attention, mlp = self.self_attn, self.mlp
        x = x + attention.o_proj(self._inner(attention.core, attention.qkv_proj(self.input_layernorm(x)), rope, attend))
        return x + mlp.down_proj(self._inner(mlp.core, mlp.gate_up_proj(self.post_attention_layernorm(x))))

    def _inner(self, core, *args):  # type: ignore[no-untyped-def]
        """Run the part between two projections; `selective` keeps its input only (arXiv 2205.05198)."""
        if self.recompute == "selective" and torch.is_grad_enabled():
            return checkpoint(core, *args, use_reentrant=False, preserve_rng_state=False)
        return core(*args)
