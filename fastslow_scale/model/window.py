"""Sliding-window attention whose memory and time are linear in the length.

After a beginning of F >= W tokens (W: the window), queries are taken in chunks of C tokens. A chunk's queries see
nothing but the chunk and the W tokens before it: one mask of [C, W + C] serves all chunks, which are rows of one batch.

The R query heads of a key-value head stand one after another as R * C queries of one head. So the keys are not
repeated, and the kernel need not group heads: on GPUs the one that takes a mask does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

SMALLEST_CHUNK = 64
"""In shorter ones the matrix products are too small to be worth a call."""


@dataclass(frozen=True)
class Cut:
    """How a sequence of `length` tokens is cut: a beginning, then `chunks` chunks, the last of which may be incomplete.

    A chunk of half the window: each query then meets W + C = 1.5 W keys, of which it sees W. Smaller chunks would meet
    fewer and copy each key more often, (W + C) / C times.
    """

    length: int
    window: int

    @property
    def beginning(self) -> int:
        """F, tokens."""
        return min(self.length, max(self.window, SMALLEST_CHUNK))

    @property
    def chunk(self) -> int:
        """C, tokens."""
        return max(self.window // 2, SMALLEST_CHUNK)

    @property
    def chunks(self) -> int:
        """N; 0 where the beginning is everything."""
        return -(-(self.length - self.beginning) // self.chunk)

    @property
    def missing(self) -> int:
        """Tokens that the last chunk lacks."""
        return self.beginning + self.chunks * self.chunk - self.length

    def queries(self, q: torch.Tensor, groups: int) -> torch.Tensor:
        """The chunks' queries: [B, H, T, d] -> [B * N, G, R * C, d]."""
        q = F.pad(q[:, :, self.beginning :], (0, 0, 0, self.missing))
        q = q.unflatten(2, (self.chunks, self.chunk)).unflatten(1, (groups, -1))
        return q.permute(0, 3, 1, 2, 4, 5).flatten(0, 1).flatten(2, 3)

    def keys(self, k: torch.Tensor) -> torch.Tensor:
        """What the chunks' queries meet: [B, G, T, d] -> [B * N, G, W + C, d]."""
        k = F.pad(k[:, :, self.beginning - self.window :], (0, 0, 0, self.missing))
        return k.unfold(2, self.window + self.chunk, self.chunk).permute(0, 2, 1, 4, 3).flatten(0, 1)

    def tokens(self, out: torch.Tensor, heads: int) -> torch.Tensor:
        """What `queries` cut, back in its place: [B * N, G, R * C, d] -> [B, H, T - F, d]."""
        groups = out.shape[1]
        out = out.unflatten(2, (heads // groups, self.chunk)).unflatten(0, (-1, self.chunks))
        out = out.permute(0, 2, 3, 1, 4, 5).flatten(3, 4).flatten(1, 2)
        return out[:, :, : self.length - self.beginning]


@dataclass(frozen=True)
class Masks:
    """What is added to the scores, the same for each of the R query heads: 0 where a query sees a key, else -inf.

    Attributes:
        beginning: [1 or B, 1, R * F, F].
        chunks: [1 or B * N, 1, R * C, W + C].
    """

    beginning: torch.Tensor
    chunks: torch.Tensor

    @classmethod
    def of(cls, cut: Cut, repeats: int, like: torch.Tensor, documents: torch.Tensor | None = None) -> Masks:
        """In dtype and place of `like`, for R = `repeats`.

        documents: [B, T], tokens with different numbers do not see each other.
        """

        def near(queries: int, before: int) -> torch.Tensor:
            """[1, queries, before + queries], the keys beginning `before` tokens earlier."""
            t = torch.arange(-before, queries, device=like.device)
            distance = t[before:, None] - t
            return ((distance >= 0) & (distance < cut.window))[None]

        def added(seen: torch.Tensor) -> torch.Tensor:
            wanted = torch.zeros_like(seen, dtype=like.dtype).masked_fill_(~seen, -torch.inf)
            return wanted.repeat(1, repeats, 1).unsqueeze(1)

        beginning, chunks = near(cut.beginning, 0), near(cut.chunk if cut.chunks else 0, cut.window)
        if documents is not None:
            first, ids = documents[:, : cut.beginning], documents[:, None, :, None]
            beginning = beginning & (first[:, :, None] == first[:, None])
            if cut.chunks:
                asking, found = cut.queries(ids, 1).flatten(1), cut.keys(ids).flatten(1)
                chunks = chunks & (asking[:, :, None] == found[:, None])
        return cls(added(beginning), added(chunks))


def windowed_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cut: Cut, masks: Masks) -> torch.Tensor:
    """softmax(q k^T / sqrt(d) + mask) v for q [B, H, T, d] and k, v [B, G, T, d] -> [B, H, T, d]."""
    heads, groups, start = q.shape[1], k.shape[1], cut.beginning
    first = F.scaled_dot_product_attention(
        q[:, :, :start].unflatten(1, (groups, -1)).flatten(2, 3), k[:, :, :start], v[:, :, :start], masks.beginning
    )
    first = first.unflatten(2, (-1, start)).flatten(1, 2)
    if not cut.chunks:
        return first
    rest = F.scaled_dot_product_attention(cut.queries(q, groups), cut.keys(k), cut.keys(v), masks.chunks)
    return torch.cat([first, cut.tokens(rest, heads)], 2)
