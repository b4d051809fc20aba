"""The order of the samples: a pure function of (seed, epoch, position), on permutations of our own.

Two levels keep reading local at any size: the members of a split are permuted as a whole, then the rows inside each
window of consecutive members. Both levels seek without walking through what came before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

WINDOW_MEMBERS = 32
_WINDOWS_KEPT = 4
_FEISTEL_ROUNDS = 8

UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]

_MASK64 = (1 << 64) - 1


def splitmix64(values: UInt64s) -> UInt64s:
    """The splitmix64 step on each value: a bijection of the 64-bit integers, the same on every machine and version."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def derive_key(*parts: int) -> int:
    """One 64-bit key from several integers."""
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        key = splitmix64(key ^ np.uint64(part & _MASK64))
    return int(key[0])


def shuffled(n: int, key: int) -> Int64s:
    """A permutation of 0 .. n-1 as an array, for n small enough to hold."""
    return np.argsort(splitmix64(np.arange(n, dtype=np.uint64) ^ np.uint64(key)), kind="stable")


class Permutation:
    """A permutation of 0 .. n-1 whose values are computed where they are asked for: O(1) memory and time at any n.

    A Feistel network permutes the 4^k >= n integers; a value outside is sent through again until it falls inside.
    """

    def __init__(self, n: int, key: int) -> None:
        self.n = n
        self._half_bits = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
        self._half_mask = np.uint64((1 << int(self._half_bits)) - 1)
        self._round_keys = [np.uint64(derive_key(key, number)) for number in range(_FEISTEL_ROUNDS)]

    def forward(self, positions: npt.ArrayLike) -> Int64s:
        """positions: one, or an array, each in 0 .. n-1; returns an array."""
        return self._walk(positions, self._encrypt)

    def inverse(self, values: npt.ArrayLike) -> Int64s:
        """The positions at which the values stand."""
        return self._walk(values, self._decrypt)

    def _walk(self, start: npt.ArrayLike, step: Callable[[UInt64s], UInt64s]) -> Int64s:
        values = step(np.atleast_1d(np.asarray(start, dtype=np.uint64)))
        while (outside := values >= np.uint64(self.n)).any():
            values[outside] = step(values[outside])
        return values.astype(np.int64)

    def _encrypt(self, values: UInt64s) -> UInt64s:
        left, right = values >> self._half_bits, values & self._half_mask
        for key in self._round_keys:
            left, right = right, left ^ (splitmix64(right ^ key) & self._half_mask)
        return (left << self._half_bits) | right

    def _decrypt(self, values: UInt64s) -> UInt64s:
        left, right = values >> self._half_bits, values & self._half_mask
        for key in reversed(self._round_keys):
            left, right = right ^ (splitmix64(left ^ key) & self._half_mask), left
        return (left << self._half_bits) | right


class SampleOrder:
    """Global position -> sample id; samples lie in members of `rows_per_member` rows, the last perhaps shorter.

    Positions run on through the epochs: position p stands in epoch p // num_samples. Sample id s is row
    s % rows_per_member of member s // rows_per_member.
    """

    def __init__(self, num_samples: int, rows_per_member: int, seed: int, window_members: int = WINDOW_MEMBERS) -> None:
        self.num_samples = num_samples
        self._rows = rows_per_member
        self._num_members = -(-num_samples // rows_per_member)
        self._missing = self._num_members * rows_per_member - num_samples
        self._seed = seed
        self._window_members = window_members
        self._windows: OrderedDict[tuple[int, int], Int64s] = OrderedDict()
        self._epoch = -1
        self._members = Permutation(self._num_members, 0)
        self._short_slot = 0

    def __call__(self, start: int, count: int) -> Int64s:
        """Sample ids at positions start .. start + count - 1."""
        parts: list[Int64s] = []
        position, end = start, start + count
        while position < end:
            epoch, within = divmod(position, self.num_samples)
            self._enter(epoch)
            window = self._window_at(within)
            offset = within - self._window_start(window)
            part = self._window(epoch, window)[offset : offset + end - position]
            parts.append(part)
            position += len(part)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def window(self, position: int) -> tuple[int, int]:
        """Epoch, and window within it, in which a position stands."""
        epoch, within = divmod(position, self.num_samples)
        self._enter(epoch)
        return epoch, self._window_at(within)

    def members_ahead(self, epoch: int, window: int) -> Int64s:
        """The members of a window and of the one after it, which may be the next epoch's first."""
        size, count = self._window_members, self._num_members
        self._enter(epoch)
        members = self._members.forward(np.arange(window * size, min((window + 2) * size, count)))
        if (window + 1) * size < count:
            return members
        self._enter(epoch + 1)
        return np.concatenate((members, self._members.forward(np.arange(min(size, count)))))

    def _enter(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._members = Permutation(self._num_members, derive_key(self._seed, epoch))
            self._short_slot = int(self._members.inverse(self._num_members - 1)[0])

    def _window_start(self, window: int) -> int:
        """First position of a window within the epoch; the short member may stand before it."""
        slot = window * self._window_members
        return slot * self._rows - (self._missing if self._short_slot < slot else 0)

    def _window_at(self, within: int) -> int:
        short_end = (self._short_slot + 1) * self._rows - self._missing
        padded = within if within < short_end else within + self._missing
        return padded // (self._window_members * self._rows)

    def _window(self, epoch: int, window: int) -> Int64s:
        """Sample ids of a window in their shuffled order."""
        ids = self._windows.get((epoch, window))
        if ids is None:
            first = window * self._window_members
            slots = np.arange(first, min(first + self._window_members, self._num_members))
            members = self._members.forward(slots)
            ids = (members[:, None] * self._rows + np.arange(self._rows)).ravel()
            ids = ids[ids < self.num_samples]
            ids = ids[shuffled(len(ids), derive_key(self._seed, epoch, window))]
            self._windows[epoch, window] = ids
            if len(self._windows) > _WINDOWS_KEPT:
                self._windows.popitem(last=False)
        return ids
