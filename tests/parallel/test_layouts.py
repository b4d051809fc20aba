"""The layout does not change the mathematics."""

from __future__ import annotations

import pytest
import torch

from fastslow_scale.config import Config
from tests.configs import small_config
from tests.parallel.layouts import Layout, compare_with_reference, train_plainly, train_through_engine
from tests.ranks import run_ranks

pytestmark = pytest.mark.parallel

FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
SHAPES = {
    "blocks straddle ranks": small_config(model=FOUR_HEADS),
    "T divides by nothing": small_config(model=FOUR_HEADS, train={"seq_length": 17}, slow={"pool_size": 3}),
    "a rank without a complete block": small_config(
        model=FOUR_HEADS, train={"seq_length": 13}, slow={"pool_size": 8, "exchange_after": [2]}
    ),
    "T shorter than a block": small_config(model=FOUR_HEADS, train={"seq_length": 5}, slow={"pool_size": 8}),
    "T equal to a block": small_config(model=FOUR_HEADS, train={"seq_length": 8}, slow={"pool_size": 8}),
    "window": small_config(model=FOUR_HEADS | {"attention_window": 3}, train={"seq_length": 71}),
    "odd vocabulary, tied": small_config(
        model=FOUR_HEADS | {"vocab_size": 37, "vocab_multiple": 4, "tie_word_embeddings": True}
    ),
    "documents": small_config(model=FOUR_HEADS, train={"seq_length": 17}, data={"reset_at_document": True}),
    "frozen_slow": small_config(model=FOUR_HEADS | {"variant": "frozen_slow"}),
}
TENSOR_PARALLEL = [Layout(tp=tp, sp=sp) for tp in (1, 2, 4) for sp in (False, True) if tp > 1 or not sp]


def test_float64_gradients_equal_one_process_and_nothing_leaks() -> None:
    names = [(shape, layout) for layout in TENSOR_PARALLEL for shape in SHAPES]
    cases = [(SHAPES[shape], layout) for shape, layout in names]
    for rank_results in run_ranks(4, compare_with_reference, cases, timeout=300):
        for name, errors in zip(names, rank_results, strict=True):
            worst = max(errors, key=lambda key: errors[key])
            assert errors[worst] < 1e-10, (name, worst, errors[worst])


STEPS = 10
TRAINED = small_config(
    model=FOUR_HEADS | {"num_hidden_layers": 1},
    slow={"exchange_after": [1]},
    train={"global_batch_size": 16, "seq_length": 14},
)


def engine_layouts(world_size: int) -> list[Layout]:
    """Every layout of this many ranks: tensor x sequence x data parallel x ZeRO stage x accumulation of 1 or 4."""
    layouts = []
    for tp in (tp for tp in (1, 2, 4) if world_size % tp == 0 and world_size // tp <= 4):
        data_parallel = world_size // tp
        for sp in (False, True) if tp > 1 else (False,):
            for zero in (0, 1, 2, 3):
                for accumulation in (1, 4):
                    size = TRAINED.train.global_batch_size // (data_parallel * accumulation)
                    layouts.append(Layout(tp, sp, zero, size))
    return layouts


@pytest.mark.parametrize("world_size", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))])
def test_training_through_the_engine_equals_a_plain_loop(world_size: int) -> None:
    layouts = engine_layouts(world_size)
    ranks = run_ranks(world_size, train_through_engine, [(TRAINED, layout) for layout in layouts], STEPS, timeout=900)
    expected = train_plainly(TRAINED, STEPS)
    assert max(expected["norms"]) > TRAINED.optimizer.grad_clip, "clipping must be active"
    for rank, results in enumerate(ranks):
        for layout, got in zip(layouts, results, strict=True):
            assert got["losses"] == pytest.approx(expected["losses"], abs=5e-6, rel=0), (rank, layout)
            assert got["norms"] == pytest.approx(expected["norms"], rel=1e-6), (rank, layout)
            assert got["replicas_agree"], (rank, layout)
            for name, weight in got["weights"].items():
                torch.testing.assert_close(weight, expected["weights"][name], atol=5e-6, rtol=0, msg=f"{layout} {name}")


def test_gradients_of_the_slow_path_clipped_apart_equal_a_plain_loop() -> None:
    tree = TRAINED.model_dump()
    tree["slow"]["initializer_range"] = "fan_in"
    tree["optimizer"] |= {"clip_slow_apart": True, "grad_clip": 0.03}
    config = Config.model_validate(tree | {"parallel": {"zero_stage": 0}})
    layouts = [Layout(tp, sp, 0, 4) for tp, sp in ((1, False), (2, False), (2, True))]
    expected = train_plainly(config, STEPS)
    for results in run_ranks(2, train_through_engine, [(config, layout) for layout in layouts], STEPS):
        for layout, got in zip(layouts, results, strict=True):
            assert got["losses"] == pytest.approx(expected["losses"], abs=5e-6, rel=0), layout
            assert got["norms"] == pytest.approx(expected["norms"], rel=1e-6), layout
            for name, weight in got["weights"].items():
                torch.testing.assert_close(weight, expected["weights"][name], atol=5e-6, rtol=0, msg=f"{layout} {name}")
    together = train_plainly(
        Config.model_validate(config.model_dump() | {"optimizer": tree["optimizer"] | {"clip_slow_apart": False}}),
        STEPS,
    )
    gate = "exchanges.0.gate"
    assert (together["weights"][gate] - expected["weights"][gate]).abs().max() > 5e-5, "the two ways differ here"
