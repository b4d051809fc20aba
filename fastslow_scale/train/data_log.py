"""What a run tells of its data: tokens of each source, and damaged members that were replaced."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from data_pipeline.mixture import Data, Mixture, MixtureOrder
from fastslow_scale.config import Config


class DataLog:
    """Collects on every rank; what it gives is the same on all of them."""

    def __init__(self, config: Config, data: Iterable[Data]) -> None:
        """`data`: all that is read from; the first is the training split."""
        self._data = list(data)
        train = self._data[0]
        self._names = train.names if isinstance(train, Mixture) else []
        self._order = MixtureOrder(train.weights, config.order_seed) if isinstance(train, Mixture) else None
        self._train, self._may_skip = config.train, config.data.on_error == "skip"
        self._met: list[str] = []
        self._told: set[str] = set()

    def on_skip(self, line: str) -> None:
        """A damaged member that this rank met, named in one line; may come more than once."""
        self._met.append(line)

    def tokens(self, step: int) -> dict[str, int]:
        """data/tokens/NAME: tokens of each source after `step` steps; their sum is `tokens`."""
        if self._order is None:
            return {}
        counts = self._order.counts(step * self._train.global_batch_size)
        names = zip(self._names, counts, strict=True)
        return {f"data/tokens/{name}": count * self._train.seq_length for name, count in names}

    def skipped(self) -> tuple[dict[str, int], list[str]]:
        """data/skipped_members, counted once each since this start of the run, and the new ones; a collective."""
        if not self._may_skip:
            return {}, []
        own = [*self._met, *(line for data in self._data for line in data.take_skipped())]
        everyones: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyones, own)
        self._met = []
        new = sorted({line for lines in everyones for line in lines} - self._told)
        self._told.update(new)
        return {"data/skipped_members": len(self._told)}, new
