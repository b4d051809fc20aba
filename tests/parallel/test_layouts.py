"""The layout does not change the mathematics."""

from __future__ import annotations

import pytest
import torch

from tests.configs import small_config
from tests.parallel.layouts import Layout, compare_with_reference, train_through_engine
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
    "window": small_config(model=FOUR_HEADS | {"attention_window": 3}),
    "odd vocabulary, tied": small_config(
        model=FOUR_HEADS | {"vocab_size": 37, "vocab_multiple": 4, "tie_word_embeddings": True}
    ),
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
