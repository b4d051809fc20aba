"""Best-fit-decreasing packing on counts per length: the cost grows with the row length, hardly with the items."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

from data_pipeline.order import Int64s


@dataclass(frozen=True)
class Bins:
    """items: indices of all items, bin after bin; starts: [bins + 1], where each bin begins in `items`."""

    items: Int64s
    starts: Int64s


@dataclass
class _Group:
    """`count` bins that hold the same lengths."""

    count: int
    contents: tuple[tuple[int, int], ...]
    """(length, how many of them), longest first."""


def fill_bins(lengths: Int64s, capacity: int) -> Bins:
    """Put items into as few bins as best-fit-decreasing finds. Items of length 0 are left out.

    Each item goes, the longest first, into the fullest bin that has room for it. Items of one length are taken in
    their order, and bins are ordered by the first of their items, so the order of the items is kept about.

    Args:
        lengths: [n], each in 0 .. capacity - 1 (or capacity).
    """
    counts = np.bincount(lengths, minlength=capacity + 1)
    groups = _best_fit_decreasing(counts, capacity)
    order = np.argsort(lengths, kind="stable")
    next_of_length = np.concatenate(([0], np.cumsum(counts)))[: capacity + 1]
    item_parts, bin_parts, num_bins = [], [], 0
    for group in groups:
        bins = np.arange(num_bins, num_bins + group.count)
        num_bins += group.count
        for length, number in group.contents:
            start = int(next_of_length[length])
            item_parts.append(order[start : start + group.count * number])
            bin_parts.append(np.repeat(bins, number))
            next_of_length[length] += group.count * number
    if not num_bins:
        return Bins(np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64))
    items, bin_of_item = np.concatenate(item_parts), np.concatenate(bin_parts)
    first = np.full(num_bins, len(lengths), dtype=np.int64)
    np.minimum.at(first, bin_of_item, items)
    place = np.empty(num_bins, dtype=np.int64)
    place[np.argsort(first)] = np.arange(num_bins)
    bin_of_item = place[bin_of_item]
    items = items[np.lexsort((items, bin_of_item))]
    starts = np.concatenate(([0], np.cumsum(np.bincount(bin_of_item, minlength=num_bins))))
    return Bins(items, starts)


def _best_fit_decreasing(counts: Int64s, capacity: int) -> list[_Group]:
    """The same bins as item by item, found for all items of one length at once.

    counts: [capacity + 1], items per length. Each length adds three groups at most.
    """
    open_groups: dict[int, list[_Group]] = {capacity: []}
    rooms: list[int] = []  # sorted: the rooms of which there is an open group
    closed: list[_Group] = []

    def put(room: int, group: _Group) -> None:
        if not room:
            closed.append(group)
            return
        if not open_groups.get(room):
            bisect.insort(rooms, room)
            open_groups[room] = []
        open_groups[room].append(group)

    for length in range(capacity, 0, -1):
        left = int(counts[length])
        while left:
            place = bisect.bisect_left(rooms, length)
            if place == len(rooms):
                each = capacity // length
                full, rest = divmod(left, each)
                if full:
                    put(capacity - each * length, _Group(full, ((length, each),)))
                if rest:
                    put(capacity - rest * length, _Group(1, ((length, rest),)))
                break
            room = rooms[place]
            group = open_groups[room].pop()
            if not open_groups[room]:
                rooms.pop(place)
            each = room // length
            if left < each:
                taken, number = 1, left
            else:
                taken, number = min(group.count, left // each), each
            if group.count > taken:
                put(room, _Group(group.count - taken, group.contents))
            put(room - number * length, _Group(taken, (*group.contents, (length, number))))
            left -= taken * number
    return closed + [group for room in rooms for group in open_groups[room]]
