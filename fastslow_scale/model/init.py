"""Weight initialisation that no layout changes: the whole weight is drawn from (seed, name), then sliced.

Each weight has its own random stream, keyed by the run's seed and the weight's full name. So the same seed gives the
same fast weights in all variants, for every tensor-parallel size, whatever else the model holds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch

Init = Callable[[torch.Tensor], torch.Tensor]


def normal(seed: int, name: str, std: float) -> Init:
    """An initialiser that fills a whole weight with N(0, std^2) drawn in fp32 from the stream (seed, name)."""

    def fill(weight: torch.Tensor) -> torch.Tensor:
        if weight.is_meta:
            return weight
        key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little", signed=True))
        with torch.no_grad():
            return weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float32).mul_(std))

    return fill


class InitScheme:
    """How wide the weights of one path (fast or slow) are drawn.

    std is `initializer_range`, or 1/sqrt(fan_in) for `fan_in`. Projections that write into the residual stream are
    scaled by 1/sqrt(2 x layers) (GPT-2), so that the stream's variance does not grow with depth.
    """

    def __init__(self, seed: int, initializer_range: float | str, num_layers: int):
        self.seed = seed
        self.initializer_range = initializer_range
        self.output_scale = 1.0 / math.sqrt(2 * max(1, num_layers))

    def std(self, fan_in: int) -> float:
        return fan_in**-0.5 if self.initializer_range == "fan_in" else float(self.initializer_range)

    def weight(self, name: str, fan_in: int) -> Init:
        return normal(self.seed, name, self.std(fan_in))

    def output_weight(self, name: str, fan_in: int) -> Init:
        return normal(self.seed, name, self.std(fan_in) * self.output_scale)
