"""Spikes and broken steps, against numpy's own mean and standard deviation."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from data_pipeline.errors import UserError
from fastslow_scale.config import TrainConfig
from fastslow_scale.train.guard import Guard

pytestmark = pytest.mark.unit

LOSSES = [3.0 + 0.1 * math.sin(7 * step) for step in range(25)]


def guard(**changes: object) -> Guard:
    sizes = {"seq_length": 8, "micro_batch_size": 1, "global_batch_size": 1, "max_steps": 10}
    return Guard(TrainConfig.model_validate(sizes | {"spike_window": 20, "spike_sigma": 5.0} | changes))


def filled(**changes: object) -> Guard:
    watching = guard(**changes)
    for loss in LOSSES:
        assert watching.judge(loss, 1.0, applied=True) is None
    return watching


def test_the_limit_is_so_many_standard_deviations_above_the_last_losses() -> None:
    last = np.array(LOSSES[-20:])
    assert filled().limit == pytest.approx(last.mean() + 5 * last.std(ddof=1), rel=1e-12)
    assert filled(spike_sigma=0.0).limit == math.inf
    assert guard().limit == math.inf, "too few losses to judge by"


def test_a_spike_is_told_and_kept_from_the_weights_only_if_asked_for() -> None:
    marking, skipping = filled(), filled(skip_spikes=True)
    assert marking.skip_above == math.inf
    assert skipping.skip_above == marking.limit
    marked = marking.judge(9.0, 1.0, applied=True)
    assert marked is not None and not marked.skipped and "9" in marked.reason
    skipped = skipping.judge(9.0, math.inf, applied=False)
    assert skipped is not None and skipped.skipped and "spike" in skipped.reason
    # An applied spike is part of the past; one that was kept out is not.
    assert marking.limit > 9.0
    assert skipping.limit == filled().limit
    assert (marking.skipped_steps, skipping.skipped_steps) == (0, 1)


@pytest.mark.parametrize(("loss", "norm", "word"), [(math.nan, 1.0, "loss"), (3.0, math.inf, "gradient norm")])
def test_a_run_stops_after_so_many_bad_steps_in_a_row(loss: float, norm: float, word: str) -> None:
    watching = guard(max_bad_steps=3)
    for bad in (True, True, False, True, True):
        verdict = watching.judge(loss if bad else 3.0, norm if bad else 1.0, applied=not bad)
        assert verdict is None or word in verdict.reason
        watching.stop_if_lost(7)
    watching.judge(loss, norm, applied=False)
    with pytest.raises(UserError, match=r"3 steps in a row were not applied, the last was step 7 .*max_bad_steps"):
        watching.stop_if_lost(7)
    assert watching.skipped_steps == 5


def test_a_checkpoint_brings_it_back_bit_for_bit() -> None:
    before = filled()
    before.judge(math.nan, math.nan, applied=False)
    after = guard()
    after.restore(json.loads(json.dumps(before.state())))
    assert after.state() == before.state()
    assert after.limit == before.limit
