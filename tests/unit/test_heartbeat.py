"""Signs of life, over a real store; faults of whole jobs are in tests/integration/test_faults.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from torch._C._distributed_c10d import TCPStore

from fastslow_scale.train.heartbeat import Heartbeat

pytestmark = pytest.mark.unit

Start = Callable[[int], Heartbeat]
PATIENCE = 150.0


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Heartbeats of a job of three ranks, which write every five seconds: in these tests once."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    with ExitStack() as ends:

        def begin(rank: int) -> Heartbeat:
            beat = Heartbeat(rank, 3, 2 * PATIENCE)
            ends.callback(beat.close)
            return beat

        yield begin


def silent(beat: Heartbeat, now: float) -> list[int]:
    return [found.rank for found in beat.newly_silent(now)]


def test_the_first_rank_names_each_silent_one_once(start: Start) -> None:
    first, second, third = start(0), start(1), start(2)
    assert silent(first, 0) == []
    assert silent(first, PATIENCE) == []
    second._write()
    assert silent(first, PATIENCE + 1) == [2]
    assert silent(first, 2 * PATIENCE) == []
    assert silent(first, 2 * PATIENCE + 2) == [1]
    third._write()
    assert silent(first, 3 * PATIENCE) == []
    assert silent(first, 4 * PATIENCE + 1) == [2]


def test_the_second_rank_watches_the_first(start: Start) -> None:
    start(0)
    second, third = start(1), start(2)
    assert (silent(second, 0), silent(third, 0)) == ([], [])
    assert (silent(second, PATIENCE + 1), silent(third, PATIENCE + 1)) == ([0], [])


def test_a_rank_that_has_ended_well_is_not_silent(start: Start) -> None:
    first, second = start(0), start(1)
    assert silent(first, 0) == []
    second.close()
    assert silent(first, PATIENCE + 1) == []
    assert [beat.rank for beat in first._read(range(3)).values()] == [0]
