"""The parts of a step, on a clock that the test turns."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work

from fastslow_scale.parallel.mesh import single_process_mesh
from fastslow_scale.train import timeline as module
from fastslow_scale.train.timeline import PARTS, Timeline

pytestmark = pytest.mark.unit


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_part_inside_another_interrupts_it(clock: Clock) -> None:
    timeline = Timeline(torch.device("cpu"))
    with timeline.measuring():
        clock.now += 1
        with timeline.part("data"):
            clock.now += 2
        with timeline.part("backward"):
            clock.now += 4
            with timeline.part("communication"):
                clock.now += 8
            clock.now += 16
        clock.now += 32
    assert timeline.seconds() == {
        "data_seconds": 2, "forward_seconds": 0, "backward_seconds": 20, "communication_seconds": 8,
        "optimizer_seconds": 0, "other_seconds": 33,
    }  # fmt: skip
    assert sum(timeline.seconds().values()) == clock.now
    split = timeline.split(step_seconds=123.0, data_seconds=1.0)
    assert split == {
        "forward_seconds": 0, "backward_seconds": 40, "communication_seconds": 16, "optimizer_seconds": 0,
        "other_seconds": 66,
    }  # fmt: skip


def test_only_the_step_that_is_asked_for_is_measured(clock: Clock) -> None:
    timeline = Timeline(torch.device("cpu"))
    for wanted in (True, False):
        with timeline.measuring(wanted), timeline.part("forward"):
            clock.now += 5
    with timeline.part("forward"):
        clock.now += 7
    assert timeline.seconds()["forward_seconds"] == 5
    with timeline.measuring():
        clock.now += 1
    assert sum(timeline.seconds().values()) == 1


def test_waiting_for_any_collective_is_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks at each look: what is counted is the number of looks, hence of marks."""
    single_process_mesh()
    ticks = itertools.count()
    monkeypatch.setattr(module, "time", type("Ticks", (), {"perf_counter": staticmethod(lambda: float(next(ticks)))}))
    timeline, wait = Timeline(torch.device("cpu")), Work.wait
    tensor = torch.ones(3)
    with timeline.measuring(), timeline.part("forward"):
        dist.all_reduce(tensor)
        dist.all_gather([torch.empty(3)], tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        beside = threading.Thread(target=dist.all_reduce, args=(torch.ones(3),))  # as a checkpoint's writer does
        beside.start()
        beside.join()
    assert timeline.seconds()["communication_seconds"] == 3
    assert Work.wait is wait, "collectives outside of a measured step are as they were"
    assert [name.removesuffix("_seconds") for name in timeline.seconds()] == list(PARTS)


def test_an_error_inside_leaves_nothing_behind(clock: Clock) -> None:
    timeline, wait = Timeline(torch.device("cpu")), Work.wait
    with pytest.raises(ValueError, match="lost"), timeline.measuring(), timeline.part("forward"):
        raise ValueError("lost")
    assert Work.wait is wait
    with timeline.part("forward"):
        clock.now += 1
    assert timeline.seconds()["forward_seconds"] == 0
