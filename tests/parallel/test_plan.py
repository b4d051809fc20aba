"""Plans against real ranks: the peak of live bytes, and the messages that recomputation repeats."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.memory import CASES, RANKS, measure, predict
from fastslow_scale.config import Config
from fastslow_scale.model.model import build_model
from fastslow_scale.parallel.ledger import Entries, Ledger
from fastslow_scale.plan.communication import recomputed_traffic
from tests.configs import small_config
from tests.parallel.layouts import Layout, meshes, tokens_of
from tests.parallel.test_layouts import FOUR_HEADS
from tests.ranks import run_ranks

pytestmark = pytest.mark.parallel


@pytest.mark.slow
def test_predicted_memory_is_what_runs_hold() -> None:
    """12 runs of 4 ranks: variants, TP 1 to 4, ZeRO 0 to 3, all recomputation modes, both dtypes; none was fitted."""
    cases = [*CASES[::2], *CASES[5:12:6]]
    measured = run_ranks(RANKS, measure, cases, timeout=1800)[0]
    for (name, config), peak in zip(cases, measured, strict=True):
        assert predict(config).peak == pytest.approx(peak, rel=0.1), name


def count(case: tuple[Config, Layout]) -> Entries:
    """What one micro-batch moves."""
    (config, mesh), *_ = meshes([case])
    model = build_model(config, mesh)
    tokens = tokens_of(config, config.train.micro_batch_size, 0)
    with Ledger(mesh) as ledger:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    return ledger.entries


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_full_recomputation_repeats_these_messages(sequence_parallel: bool) -> None:
    layout = Layout(tp=2, sp=sequence_parallel)
    none, full = (small_config(model=FOUR_HEADS, train={"recompute": mode}) for mode in ("none", "full"))
    for before, after in zip(run_ranks(2, count, (none, layout)), run_ranks(2, count, (full, layout)), strict=True):
        more = {key: (entry.calls - before[key].calls, entry.bytes - before[key].bytes) for key, entry in after.items()}
        expected = {key: (entry.calls, entry.bytes) for key, entry in recomputed_traffic(layout.of(full)).items()}
        assert {key: value for key, value in more.items() if value != (0, 0)} == expected


@pytest.mark.slow
def test_a_model_that_no_machine_here_holds_needs_what_is_predicted() -> None:
    """512 ranks of the 7B config by fake tensors, every recomputation mode."""
    command = [sys.executable, "benchmarks/fake_memory.py", "configs/7b.yaml", "--world-size", "512"]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[2:]
    ratios = {line.split(" | ")[1]: float(line.split(" | ")[-1].rstrip(" |")) for line in table}
    assert list(ratios) == ["none", "selective", "full"]
    assert list(ratios.values()) == pytest.approx([1, 1, 1], abs=0.05)
