"""Several data folders mixed by exact quotas: which source, and which of its samples, stands at a position.

The positions are cut into blocks. Up to the end of each block every source has had its share of the positions, rounded
to a whole sample; inside a block the sources are shuffled by a key. So the mixture, like the order of one folder, is a
pure function of (seed, position) that starts anywhere at once, and no source ever drifts from its share.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, lcm
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from data_pipeline.errors import UserError
from data_pipeline.folder import CacheSettings
from data_pipeline.order import Int64s, SampleOrder, derive_key, shuffled
from data_pipeline.stream import OnError, TokenDataset

_BLOCK = 1024
_SMALLEST_SHARE = Fraction(1, 1 << 20)
_BLOCKS_KEPT = 4
_SHUFFLE = 0x6D69780A  # keeps the keys of the blocks apart from those of the samples' order


@dataclass(frozen=True)
class Source:
    """One of the folders to mix; `weight` is relative to the sum of all."""

    path: Path | str
    weight: float
    name: str


def source_name(path: Path | str) -> str:
    """The last part of a path or URL."""
    return str(path).rstrip("/").rpartition("/")[2]


class MixtureOrder:
    """Global position -> source, and the position within the endless order of that source."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """Weights are taken as the decimal numbers that they print as: 0.7 and 0.3 are seven and three tenths.

        Raises:
            UserError: a share of less than about a millionth.
        """
        exact = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(weight.denominator for weight in exact))
        parts = [int(weight * scale) for weight in exact]
        self._total = sum(parts)
        smallest = Fraction(min(parts), self._total)
        if smallest < _SMALLEST_SHARE:
            raise UserError(f"data.sources: a share of {float(smallest):.2g} is too small (at least 1e-06)")
        self._ends = [sum(parts[: number + 1]) for number in range(len(parts))]
        # A block in which each source's exact share is at least 1: rounding then never takes a sample back.
        self.block = max(_BLOCK, 1 << (ceil(1 / smallest) - 1).bit_length())
        self._seed = seed
        self._blocks: OrderedDict[int, tuple[Int64s, Int64s]] = OrderedDict()

    def __call__(self, start: int, count: int) -> tuple[Int64s, Int64s]:
        """Positions start .. start + count - 1 -> (source [count], position within that source [count])."""
        sources, positions = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        position, end = start, start + count
        while position < end:
            block, offset = divmod(position, self.block)
            of, within = (values[offset : offset + end - position] for values in self._block_at(block))
            sources.append(of)
            positions.append(within)
            position += len(of)
        return np.concatenate(sources), np.concatenate(positions)

    def counts(self, position: int) -> list[int]:
        """How many of the positions before this one each source has."""
        block, offset = divmod(position, self.block)
        before = self._counts_at(block)
        inside = np.bincount(self._block_at(block)[0][:offset], minlength=len(before)) if offset else before * 0
        return (before + inside).tolist()

    def _counts_at(self, block: int) -> Int64s:
        """Samples of each source before a block: differences of the rounded cumulative shares."""
        position = block * self.block
        ends = [floor(Fraction(position * end, self._total) + Fraction(1, 2)) for end in self._ends]
        return np.array([end - before for before, end in zip([0, *ends], ends, strict=False)], dtype=np.int64)

    def _block_at(self, block: int) -> tuple[Int64s, Int64s]:
        values = self._blocks.get(block)
        if values is None:
            first = self._counts_at(block)
            quotas = self._counts_at(block + 1) - first
            sorted_sources = np.repeat(np.arange(len(quotas)), quotas)
            place = shuffled(self.block, derive_key(self._seed, _SHUFFLE, block))
            sources = sorted_sources[place]
            positions = np.empty(self.block, dtype=np.int64)
            # a stable sort lists each source's places in rising order: the source is read in its own order
            positions[np.argsort(sources, kind="stable")] = np.arange(self.block) - np.repeat(
                np.cumsum(quotas) - quotas - first, quotas
            )
            values = self._blocks[block] = sources, positions
            if len(self._blocks) > _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        return values


class Mixture:
    """Data folders that are read as one; stands where one `TokenDataset` could stand."""

    def __init__(self, sources: Sequence[Source], datasets: Sequence[TokenDataset]) -> None:
        """Use `open`."""
        first = datasets[0]
        self.names = [source.name for source in sources]
        self.weights = [source.weight for source in sources]
        self.datasets = list(datasets)
        self.location = ", ".join(dataset.location for dataset in datasets)
        self.tokenizer_path = first.tokenizer_path
        self.tokenizer_sha256 = first.tokenizer_sha256
        self.seq_length, self.vocab_size = first.seq_length, first.vocab_size
        self.eos_id, self.pad_id = first.eos_id, first.pad_id
        content = [[dataset.fingerprint, source.weight] for source, dataset in zip(sources, datasets, strict=True)]
        self.fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        self._fixed = MixtureOrder(self.weights, seed=0)
        self.num_samples = self._without_repeats()

    @classmethod
    def open(
        cls,
        sources: Sequence[Source],
        split: str = "train",
        *,
        on_error: OnError = "stop",
        cache: CacheSettings | None = None,
    ) -> Mixture:
        """Open every source and check that they fit together.

        Raises:
            UserError: a source that cannot be read, or two that do not fit.
        """
        datasets = [TokenDataset.open(source.path, split, on_error=on_error, cache=cache) for source in sources]
        first = datasets[0]
        for other in datasets[1:]:
            if other.tokenizer_sha256 != first.tokenizer_sha256:
                raise UserError(
                    f"data.sources: {first.location} and {other.location} were encoded by different tokenizers "
                    f"({first.tokenizer_sha256[:12]}, {other.tokenizer_sha256[:12]})"
                )
            for name in ("seq_length", "vocab_size", "eos_id", "pad_id"):
                one, two = getattr(first, name), getattr(other, name)
                if one != two:
                    raise UserError(
                        f"data.sources: {first.location} has {name} {one}, {other.location} has {name} {two}"
                    )
        return cls(sources, datasets)

    def rows(self, indices: Iterable[int]) -> torch.Tensor:
        """Rows of a fixed mixture, whose prefixes hold the sources in proportion -> int64 [n, seq_length + 1].

        Ids run from 0 to num_samples - 1, where the first source is used up. For validation: no row comes twice.
        """
        places = [self._fixed(index, 1) for index in indices]
        sources = np.array([int(source[0]) for source, _ in places], dtype=np.int64)
        ids = np.array([int(position[0]) for _, position in places], dtype=np.int64)
        return torch.from_numpy(_gather(self.datasets, sources, ids).astype(np.int64))

    def sources_of_rows(self, count: int) -> Int64s:
        """The source, by its number, of each of the first `count` rows of `rows`."""
        return self._fixed(0, count)[0]

    def take_skipped(self) -> list[str]:
        """See `TokenDataset.take_skipped`."""
        return [line for dataset in self.datasets for line in dataset.take_skipped()]

    def _without_repeats(self) -> int:
        """The most positions in which no source gives more rows than it has."""
        sizes = np.array([dataset.num_samples for dataset in self.datasets])
        low, high = 0, int(sizes.sum())
        while low < high:
            middle = (low + high + 1) // 2
            if (np.array(self._fixed.counts(middle)) <= sizes).all():
                low = middle
            else:
                high = middle - 1
        return low


Data: TypeAlias = TokenDataset | Mixture


class Place(NamedTuple):
    """A sample as a run meets it: `epoch` is that of its source, `member` names shard and member."""

    position: int
    source: int
    epoch: int
    sample: int
    member: str
    row: int


class Reader:
    """Global position -> rows, for one folder or a mixture. Each source goes through its own epochs."""

    def __init__(self, data: Data, seed: int) -> None:
        self._datasets = data.datasets if isinstance(data, Mixture) else [data]
        self._orders = [
            SampleOrder(dataset.num_samples, dataset.manifest.rows_per_member, seed) for dataset in self._datasets
        ]
        self._mixture = MixtureOrder(data.weights, seed) if isinstance(data, Mixture) else None
        self._ahead = [(-1, -1)] * len(self._datasets)

    def places(self, start: int, count: int) -> tuple[Int64s, Int64s]:
        """Positions start .. start + count - 1 -> (source [count], sample id in that source [count])."""
        sources, positions = self._positions(start, count)
        ids = np.empty(count, dtype=np.int64)
        for number, order in enumerate(self._orders):
            own = sources == number
            if own.any():
                wanted = positions[own]
                ids[own] = order(int(wanted[0]), len(wanted))  # a source's positions follow one another
        return sources, ids

    def audit(self, start: int, count: int) -> Iterator[Place]:
        """What stands at positions start .. start + count - 1, and where it lies."""
        sources, positions = self._positions(start, count)
        ids = self.places(start, count)[1]
        columns = zip(sources.tolist(), positions.tolist(), ids.tolist(), strict=True)
        for number, (source, position, sample) in enumerate(columns):
            dataset = self._datasets[source]
            member, row = divmod(sample, dataset.manifest.rows_per_member)
            yield Place(start + number, source, position // dataset.num_samples, sample, dataset.place(member), row)

    def _positions(self, start: int, count: int) -> tuple[Int64s, Int64s]:
        """(source [count], position within that source [count])"""
        if self._mixture is None:
            return np.zeros(count, dtype=np.int64), np.arange(start, start + count)
        return self._mixture(start, count)

    def stored_rows(self, start: int, count: int) -> npt.NDArray[Any]:
        """[count, seq_length + 1] as stored; what comes next is fetched meanwhile where the data lies far away."""
        self._prefetch(start, count)
        return _gather(self._datasets, *self.places(start, count))

    def _prefetch(self, start: int, count: int) -> None:
        ends = self._mixture.counts(start + count) if self._mixture else [start + count]
        for number, (dataset, order, end) in enumerate(zip(self._datasets, self._orders, ends, strict=True)):
            if dataset.far_away and (window := order.window(end)) != self._ahead[number]:
                self._ahead[number] = window
                dataset.prefetch(order.members_ahead(*window).tolist())


def _gather(datasets: Sequence[TokenDataset], sources: Int64s, ids: Int64s) -> npt.NDArray[Any]:
    """Rows by source and sample id, as stored."""
    if len(datasets) == 1:
        return datasets[0].stored_rows(ids)
    out = np.empty((len(ids), datasets[0].seq_length + 1), dtype=datasets[0].manifest.dtype)
    for number, dataset in enumerate(datasets):
        own = sources == number
        if own.any():
            out[own] = dataset.stored_rows(ids[own])
    return out


def sources_of(entries: Iterable[tuple[str, float, str | None]]) -> list[Source]:
    """(path, weight, name or None) of a config -> sources; the name is by default the folder's.

    Raises:
        UserError: two sources of one name.
    """
    sources = [Source(path, weight, name or source_name(path)) for path, weight, name in entries]
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"data.sources has two sources named {name!r}: give one of them another name")
    return sources
