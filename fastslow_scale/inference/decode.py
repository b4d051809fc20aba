"""Token-by-token decoding: the training forward's own layers, on what they remember of each row.

Fast layers and slow layers each keep a cache of keys and values; an exchange keeps the running sum of the block that is
not yet complete and what the last complete one gave. So the slow path runs once per P tokens.

The rows of a batch are prompts of unequal length. Blocks, rotary positions and cache places count from each row's own
first token. The prompts run together through the causal forward with the padding behind them, where no token sees it;
after that each row goes on at its own position.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F

from fastslow_scale.model.attention import Attend, Attention, causal_attention, rope_table
from fastslow_scale.model.coupling import Exchange
from fastslow_scale.model.layers import Layer, Rope
from fastslow_scale.model.model import FastSlowModel
from fastslow_scale.parallel.collectives import pool, spread

Exchanged = tuple[torch.Tensor, torch.Tensor | None]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Next:
    """The next entry, a token or a block, of R rows of the batch.

    Attributes:
        rows: which ones, [R].
        positions: where each row's entry stands, counted from the row's first one, [R].
        longest: the largest of these positions.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    longest: int

    @classmethod
    def of(cls, positions: dict[int, int], device: torch.device) -> Next:
        """`positions`: row -> position."""
        rows, places = torch.tensor([list(positions), list(positions.values())], device=device)
        return cls(rows, places, max(positions.values()))

    def angles(self, rope: Rope) -> Rope:
        """The rows of a table for all positions that rotate these entries, both [1, R, 1, 1, head_dim]."""
        cos, sin = rope
        return cos[self.positions].transpose(0, 1), sin[self.positions].transpose(0, 1)


class Cache:
    """Keys and values of one layer, [B, G, size, head_dim]: position p of a row lies at place p % size.

    With the attention window as its size, a new entry takes the place of the one that has just left the window.
    """

    def __init__(self, attention: Attention, batch: int, capacity: int):
        weight = cast(torch.Tensor, attention.qkv_proj.weight)
        groups = weight.shape[0] // ((attention.queries_per_group + 2) * attention.head_dim)
        self.size = min(capacity, attention.window or capacity)
        self.keys = weight.new_zeros(batch, groups, self.size, attention.head_dim)
        self.values = torch.zeros_like(self.keys)

    def filling(self, lengths: torch.Tensor) -> Attend:
        """Ordinary causal attention, which leaves the newest of each row's first `lengths` entries in the cache."""

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
            newest = lengths[:, None] - 1
            positions = newest - (newest - torch.arange(self.size, device=k.device)) % self.size
            # Before position 0 nothing is: what is put there instead is never seen.
            source = positions.clamp(min=0)[:, None, :, None].expand(*k.shape[:2], -1, k.shape[3])
            self.keys, self.values = k.gather(2, source), v.gather(2, source)
            return causal_attention(q, k, v, window)

        return attend

    def appending(self, new: Next) -> Attend:
        """Attention of one new entry of some rows, [R, H, 1, head_dim], to what its row's cache holds and to itself."""

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
            place = new.positions % self.size
            self.keys[new.rows, :, place] = k[:, :, 0]
            self.values[new.rows, :, place] = v[:, :, 0]
            used = min(self.size, new.longest + 1)
            filled = torch.arange(used, device=q.device) <= new.positions[:, None]
            keys, values = self.keys[:, :, :used], self.values[:, :, :used]
            if len(new.rows) < len(keys):
                keys, values = keys[new.rows], values[new.rows]
            grouped = q.shape[1] != keys.shape[1]
            return F.scaled_dot_product_attention(
                q, keys, values, attn_mask=filled[:, None, None, :], enable_gqa=grouped
            )

        return attend


class ExchangeState:
    """What one exchange remembers of each row.

    Attributes:
        block_sum: sum of x over the tokens of the block that is not yet complete, [B, D].
        given: c of the last complete block, which the tokens of the next one receive; zero before there is one, [B, D].
    """

    def __init__(self, exchange: Exchange, batch: int, capacity: int):
        self.exchange = exchange
        self.caches = [
            Cache(cast(Layer, layer).self_attn, batch, capacity // exchange.pool_size) for layer in exchange.slow_layers
        ]
        self.given = exchange.gate.new_zeros(batch, exchange.gate.shape[0])
        self.block_sum = torch.zeros_like(self.given, dtype=torch.promote_types(self.given.dtype, torch.float32))

    def start(self, x: torch.Tensor, y: torch.Tensor | None, lengths: torch.Tensor, rope: Rope) -> Exchanged:
        """The exchange over whole prompts: x [T, B, D], y [T // P, B, D_slow] -> the same.

        lengths: each row's own tokens among the T, [B].
        """
        exchange, size, length = self.exchange, self.exchange.pool_size, x.shape[0]
        complete = lengths // size
        t = torch.arange(length, device=x.device)[:, None]
        pending = (t >= complete * size) & (t < lengths)
        self.block_sum = (x * pending[..., None]).sum(0, dtype=self.block_sum.dtype)
        if length < size:
            return x, y
        p = pool(x, size, length // size, first_token=0, group=None)
        c, y = exchange.answer(p, y, rope, [cache.filling(complete) for cache in self.caches])
        self.given = F.pad(c, (0, 0, 0, 0, 1, 0))[complete, torch.arange(x.shape[1], device=x.device)]
        return x + spread(c, size, length, first_token=0, group=None), y

    def step(self, x: torch.Tensor, y: torch.Tensor | None, ending: Next | None, rope: Rope) -> Exchanged:
        """The exchange for one token of each row: x [1, B, D], and y [1, R, D_slow] of the R blocks that end with it.

        ending: these blocks, or None where no row's block ends: then the slow path does not run.
        """
        received = x + self.given
        self.block_sum += x[0]
        if ending is not None:
            p = (self.block_sum[ending.rows] / self.exchange.pool_size).to(x.dtype).unsqueeze(0)
            attends = [cache.appending(ending) for cache in self.caches]
            c, y = self.exchange.answer(p, y, ending.angles(rope), attends)
            self.given[ending.rows] = c[0]
            self.block_sum[ending.rows] = 0
        return received, y


class Decoder:
    """A model in the middle of B texts.

    Args:
        model: of one process, without sequence parallelism.
        batch: B.
        capacity: the most tokens that a text will have, prompt included.
        clock: measures the exchanges.

    Attributes:
        lengths: tokens of each text so far.
        slow_steps: how many calls of `step` ran the slow path.
        exchange_seconds: what all exchanges took, prompts included, by `clock`.
    """

    def __init__(self, model: FastSlowModel, batch: int, capacity: int, clock: Clock = time.perf_counter):
        self.model = model
        self.lengths = [0] * batch
        self.slow_steps = 0
        self.exchange_seconds = 0.0
        self._clock = clock
        self._fast = [Cache(cast(Layer, layer).self_attn, batch, capacity) for layer in model.layers]
        self._slow = [ExchangeState(cast(Exchange, e), batch, capacity) for e in model.exchanges]
        like, theta = model.norm.weight, model.config.model.rope_theta
        self._rope = rope_table(capacity, model.config.model.head_dim, theta, like)
        self._slow_rope = self._rope
        if self._slow:
            exchange = self._slow[0].exchange
            self._slow_rope = rope_table(capacity // exchange.pool_size, model.config.slow.head_dim, theta, like)

    @torch.no_grad()
    def start(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Take in the prompts, each of at least one token -> logits of the token after each, [B, vocab_size]."""
        self.lengths = [len(prompt) for prompt in prompts]
        longest, device = max(self.lengths), self._rope[0].device
        tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
        lengths = torch.tensor(self.lengths, device=device)

        rope, slow_rope = (_first(longest, self._rope), self._slow_rope)
        if self._slow:
            slow_rope = _first(longest // self._slow[0].exchange.pool_size, slow_rope)
        hidden = self._run(
            tokens,
            rope,
            lambda cache: cache.filling(lengths),
            lambda state, x, y: state.start(x, y, lengths, slow_rope),
        )
        last = hidden[lengths - 1, torch.arange(len(prompts), device=device)]
        return self.model.lm_head.logits(last.unsqueeze(0))[0]

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Take in one more token of each row -> logits of the token after it, [B, vocab_size]."""
        device = self._rope[0].device
        new = Next.of(dict(enumerate(self.lengths)), device)
        self.lengths = [length + 1 for length in self.lengths]
        ending = self._ending_blocks(device)
        self.slow_steps += ending is not None
        hidden = self._run(
            torch.tensor(tokens, device=device).unsqueeze(1),
            new.angles(self._rope),
            lambda cache: cache.appending(new),
            lambda state, x, y: state.step(x, y, ending, self._slow_rope),
        )
        return self.model.lm_head.logits(hidden)[0]

    def _run(
        self,
        tokens: torch.Tensor,
        rope: Rope,
        attend: Callable[[Cache], Attend],
        exchange: Callable[[ExchangeState, torch.Tensor, torch.Tensor | None], Exchanged],
    ) -> torch.Tensor:
        """Through the layers, each with its cache, and the exchanges between them: [B, t] ids -> [t, B, D], normed."""
        model = self.model
        x = model.embed_tokens(tokens).transpose(0, 1).contiguous()
        y = None
        for number, (layer, cache) in enumerate(zip(model.layers, self._fast, strict=True), start=1):
            x = layer(x, rope, attend(cache))
            if number in model.exchange_at:
                before = self._clock()
                x, y = exchange(self._slow[model.exchange_at[number]], x, y)
                self.exchange_seconds += self._clock() - before
        return model.norm(x)

    def _ending_blocks(self, device: torch.device) -> Next | None:
        """The blocks that the newest tokens complete."""
        if not self._slow:
            return None
        size = self._slow[0].exchange.pool_size
        blocks = {row: length // size - 1 for row, length in enumerate(self.lengths) if length % size == 0}
        return Next.of(blocks, device) if blocks else None


def _first(count: int, rope: Rope) -> Rope:
    cos, sin = rope
    return cos[:count], sin[:count]
