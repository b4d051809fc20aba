"""The slow path: what happens to pooled tokens. Whole sequences, whole weights, the same on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastslow_scale.config import ModelConfig, SlowConfig
from fastslow_scale.model.attention import Attend, causal_attention
from fastslow_scale.model.init import InitScheme
from fastslow_scale.model.layers import Layer, Recompute, Rope
from fastslow_scale.model.linear import ReplicatedLinears
from fastslow_scale.model.norm import RMSNorm


def exactly(attend: Attend) -> Attend:
    """The same attention with the kernel that keeps replicas equal, wherever it is called: in the forward, and once
    more by the backward if activations are recomputed."""

    def attend_exactly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
        with deterministic_attention(q.device):
            return attend(q, k, v, window)

    return attend_exactly


@contextlib.contextmanager
def deterministic_attention(device: torch.device) -> Iterator[None]:
    """Keep the replicas bitwise equal: on GPUs the fused attention kernels sum gradients in no fixed order."""
    if device.type == "cuda":
        with sdpa_kernel(SDPBackend.MATH):
            yield
    else:
        yield


class SlowPath(nn.Module):
    """One exchange's slow weights.

    y     = y + pool_proj(pool_norm(p))                     (without an earlier y: y = pool_proj(pool_norm(p)))
    y     = num_layers slow layers (causal over blocks, rotary position = block index)
    phi   = phi_down(silu(phi_up(phi_norm(y))))
    """

    def __init__(
        self, name: str, model: ModelConfig, slow: SlowConfig, seed: int, recompute: Recompute, dtype: torch.dtype
    ):
        super().__init__()
        depth = slow.num_layers * len(slow.exchange_after)
        init = InitScheme(seed, slow.initializer_range or model.initializer_range, depth)
        linears = ReplicatedLinears(dtype)
        width, inner = slow.hidden_size, slow.phi_intermediate_size
        assert width and inner and slow.intermediate_size and slow.num_attention_heads and slow.num_key_value_heads

        def linear(part: str, fan_in: int, fan_out: int) -> nn.Module:
            return linears.column(fan_in, fan_out, init.weight(f"{name}.{part}.weight", fan_in))

        self.pool_norm = RMSNorm(model.hidden_size, model.rms_norm_eps, dtype)
        self.pool_proj = linear("pool_proj", model.hidden_size, width)
        self.slow_layers = nn.ModuleList(
            Layer(
                f"{name}.slow_layers.{j}",
                hidden_size=width,
                intermediate_size=slow.intermediate_size,
                num_attention_heads=slow.num_attention_heads,
                num_key_value_heads=slow.num_key_value_heads,
                rms_norm_eps=model.rms_norm_eps,
                window=None,
                recompute=recompute,
                dtype=dtype,
                linears=linears,
                init=init,
            )
            for j in range(slow.num_layers)
        )
        self.phi_norm = RMSNorm(width, model.rms_norm_eps, dtype)
        self.phi_up = linear("phi_up", width, inner)
        self.phi_down = linear("phi_down", inner, model.hidden_size)

    def advance(
        self, p: torch.Tensor, y: torch.Tensor | None, rope: Rope, attends: Sequence[Attend] | None = None
    ) -> torch.Tensor:
        """Take the pooled tokens in and run the slow layers: [S, B, D] and [S, B, D_slow] -> [S, B, D_slow].

        attends: how each slow layer attends; None: each block to the blocks of `p` up to itself.
        """
        if attends is None:
            attends = [causal_attention] * len(self.slow_layers)
        entered = self.pool_proj(self.pool_norm(p))
        y = entered if y is None else y + entered
        for layer, attend in zip(self.slow_layers, attends, strict=True):
            y = layer(y, rope, exactly(attend))
        return y

    def phi(self, y: torch.Tensor) -> torch.Tensor:
        """The slow state as seen by the fast path: [S, B, D_slow] -> [S, B, D]."""
        return self.phi_down(F.silu(self.phi_up(self.phi_norm(y))))
