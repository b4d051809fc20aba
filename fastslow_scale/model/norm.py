"""RMSNorm (arXiv 1910.07467) whose weight's gradient is complete under sequence parallelism."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fastslow_scale.parallel.collectives import Group, complete_grad


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """w * x / sqrt(mean(x^2) + eps), over the last dimension."""
    return F.rms_norm(x, weight.shape, weight, eps)


class RMSNorm(nn.Module):
    """norm(x) = w * x / sqrt(mean(x^2) + eps), over the last dimension.

    Args:
        group: the ranks over which the tokens are split, or None where each rank sees the whole sequence.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, group: Group = None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps = eps
        self.group = group
        self.normalize = rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normalize(x, complete_grad(self.weight, self.group), self.eps)
