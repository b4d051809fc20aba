"""What the engine promises beyond the layouts' equality: variants, short sequences, bf16 sums, broken numbers."""

from __future__ import annotations

import pytest
import torch

from fastslow_scale.config import Config
from tests.configs import small_config
from tests.parallel.layouts import Layout, accumulated_gradient, broken_step, train_through_engine
from tests.parallel.test_layouts import FOUR_HEADS
from tests.ranks import run_ranks

pytestmark = pytest.mark.parallel

STEPS = 20


def variant(name: str, **train: object) -> Config:
    return small_config(model=FOUR_HEADS | {"variant": name}, train={"seq_length": 14, **train})


def test_twenty_steps_of_frozen_equal_dense_bit_for_bit() -> None:
    layouts = [Layout(1, False, 0), Layout(1, False, 1), Layout(1, False, 3), Layout(2, False, 1), Layout(2, True, 2)]
    cases = [(variant(name), layout) for layout in layouts for name in ("dense", "frozen")]
    results = run_ranks(2, train_through_engine, cases, STEPS, timeout=300)[0]
    for layout, dense, frozen in zip(layouts, results[::2], results[1::2], strict=True):
        assert dense["losses"] == frozen["losses"], layout
        assert dense["norms"] == frozen["norms"], layout
        assert len(set(dense["losses"])) == STEPS, "the model must learn"
        for name, weight in dense["weights"].items():
            assert torch.equal(weight, frozen["weights"][name]), (layout, name)
        gates = [weight for name, weight in frozen["weights"].items() if name.endswith("gate")]
        assert gates
        assert all((gate == 0).all() for gate in gates)


def test_frozen_slow_moves_only_gates_and_phi_down() -> None:
    case = (variant("frozen_slow"), Layout(2, True, 1))
    one, many = (run_ranks(2, train_through_engine, [case], steps)[0][0]["weights"] for steps in (1, STEPS))
    moved = {name for name in one if name.startswith("exchanges.") and not torch.equal(one[name], many[name])}
    assert moved == {f"exchanges.{k}.{part}" for k in (0, 1) for part in ("gate", "phi_down.weight")}


@pytest.mark.parametrize("length", [5, 8])
def test_a_sequence_no_longer_than_a_block_trains_in_every_stage(length: int) -> None:
    """No exchange happens, so no slow weight gets a gradient: the step must end all the same."""
    config = small_config(model=FOUR_HEADS, slow={"pool_size": 8}, train={"seq_length": length})
    layouts = [Layout(2, sp, zero) for sp in (False, True) for zero in (0, 1, 2, 3)]
    results = run_ranks(4, train_through_engine, [(config, layout) for layout in layouts], 2, timeout=120)[0]
    for layout, result in zip(layouts, results, strict=True):
        assert result["losses"] == pytest.approx(results[0]["losses"], abs=5e-6), layout


@pytest.mark.parametrize("zero", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_bf16_sums_over_micro_batches_in_fp32(zero: int) -> None:
    """The error against float64 does not grow with the number of micro-batches, as it does for sums in bf16."""
    cases = [
        (variant("coupled", dtype="bf16", global_batch_size=2 * count), Layout(1, False, zero)) for count in (16, 256)
    ]
    few, many = run_ranks(1, accumulated_gradient, cases, timeout=200)[0]
    assert few < 0.015
    assert many < 1.3 * few


def test_a_broken_gradient_on_one_rank_changes_no_weight_on_any() -> None:
    layouts = [Layout(2, True, zero) for zero in (0, 1, 2, 3)] + [Layout(1, False, zero) for zero in (0, 1, 3)]
    cases = [(variant("coupled"), layout) for layout in layouts]
    cases += [(variant("coupled", dtype="bf16"), Layout(2, True, zero)) for zero in (1, 2, 3)]
    cases.sort(key=lambda case: case[1].tp)
    for results in run_ranks(4, broken_step, cases, timeout=200):
        for case, result in zip(cases, results, strict=True):
            assert result == {"applied": False, "unchanged": True, "recovered": True}, case[1]
