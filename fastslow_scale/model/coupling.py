"""The one place where the fast and the slow path meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fastslow_scale.config import ModelConfig, SlowConfig
from fastslow_scale.model.attention import Attend
from fastslow_scale.model.documents import BlockDocuments
from fastslow_scale.model.layers import Recompute, Rope
from fastslow_scale.model.slow_path import SlowPath
from fastslow_scale.parallel.collectives import Group, pool, spread


@dataclass(frozen=True)
class Tokens:
    """Which tokens of the sequence this rank holds.

    Attributes:
        total: T, the sequence's own length; padding after it belongs to no block.
        first: number of this rank's first token (0 without sequence parallelism).
        group: the ranks that hold the others, or None where every rank holds all.
        documents: which of them may meet in a block, or None where all may.
    """

    total: int
    first: int
    group: Group
    documents: BlockDocuments | None = None


class Exchange(SlowPath):
    """Fast to slow and back, after one fast layer.

    p_b = mean of x over the P tokens of complete block b       pool: the fast path's ranks sum their tokens
    y   = slow path (p, y)                                      the same on every rank
    c   = gate * phi(y)                                         gate [D], zero at initialisation
    x_t = x_t + c_{t // P - 1}                                  spread: each rank serves its own tokens

    The shift by one block keeps the model causal: block b's mean holds tokens that the tokens of block b may not see.
    Where documents are kept apart, the mean is over the tokens of the block's own document (its last token's), slow
    attention and c stay within it.

    With `shuffled`, c comes from another sequence of the batch: the same work, but no information about the sequence.

    While `measure` is on, `energy` holds the squared norms of this rank's c and x and of the gate, [3], and `state` the
    slow state y.
    """

    def __init__(
        self, name: str, model: ModelConfig, slow: SlowConfig, seed: int, recompute: Recompute, dtype: torch.dtype
    ):
        super().__init__(name, model, slow, seed, recompute, dtype)
        self.pool_size = slow.pool_size
        self.gate = nn.Parameter(torch.zeros(model.hidden_size, dtype=dtype))
        self.shuffled = model.variant == "shuffled"
        self.measure = False
        self.energy: torch.Tensor | None = None
        self.state: torch.Tensor | None = None

    def forward(
        self, x: torch.Tensor, y: torch.Tensor | None, tokens: Tokens, rope: Rope
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [t, B, D] (this rank's tokens) and y [S, B, D_slow] or None -> the new x and y."""
        num_blocks, documents = tokens.total // self.pool_size, tokens.documents
        if documents is None:
            p = pool(x, self.pool_size, num_blocks, tokens.first, tokens.group)
            c, y = self.answer(p, y, rope)
        else:
            p = pool(x * documents.pooled, self.pool_size, num_blocks, tokens.first, tokens.group)
            attends = [documents.blocks.attend] * len(self.slow_layers)
            c, y = self.answer(p * self.pool_size / documents.counted, y, rope, attends)
        if self.shuffled:
            c = of_another_sequence(c)
        own = spread(c, self.pool_size, x.shape[0], tokens.first, tokens.group)
        if documents is not None:
            own = own * documents.served
        if self.measure:
            self.energy = torch.stack([t.detach().float().square().sum() for t in (own, x, self.gate)])
            self.state = y.detach()
        return x + own, y

    def answer(
        self, p: torch.Tensor, y: torch.Tensor | None, rope: Rope, attends: Sequence[Attend] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What blocks give to the tokens after them: p [S, B, D] and y -> c [S, B, D] and the new y [S, B, D_slow]."""
        y = self.advance(p, y, rope, attends)
        return self.gate * self.phi(y), y


def of_another_sequence(c: torch.Tensor) -> torch.Tensor:
    """[S, B, D] -> [S, B, D]: each sequence is given its neighbour's; one that is alone is given nothing."""
    return c.roll(1, dims=1) if c.shape[1] > 1 else torch.zeros_like(c)
