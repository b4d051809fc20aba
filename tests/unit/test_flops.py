"""The formula against torch's own counter, which sees every matrix product that is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fastslow_scale.model.flops import count_flops
from fastslow_scale.model.model import build_model
from fastslow_scale.parallel.mesh import single_process_mesh
from tests.configs import small_config

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"variant": "dense"}},
        {"slow": {"pool_size": 3, "exchange_after": [1, 2, 3], "num_layers": 2, "hidden_size": 24}},
        {"slow": {"num_layers": 0, "phi_intermediate_size": 5}},
        {"train": {"seq_length": 4}},
        {"model": {"num_key_value_heads": 1}, "train": {"seq_length": 19}},
    ],
)
def test_the_formula_counts_what_torch_counts(changes: dict[str, Any]) -> None:
    config = small_config(**changes)
    model = build_model(config, single_process_mesh(), torch.float32)
    tokens = torch.zeros(1, config.train.seq_length, dtype=torch.int64)
    # The fused kernel for CPUs is not among the operations that the counter knows.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.logits(tokens)
    assert count_flops(config).forward == counter.get_total_flops()


def test_what_the_chunks_of_a_window_meet_beyond_it_is_not_counted() -> None:
    config = small_config(model={"attention_window": 70}, train={"seq_length": 200})
    model = build_model(config, single_process_mesh(), torch.float32)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.logits(torch.zeros(1, 200, dtype=torch.int64))
    # A beginning of a window, then three chunks of 64 tokens (the last one not full), each with the window before it.
    met, seen = 70 * 70 + 3 * 64 * (70 + 64), 200 * 70
    beyond = config.model.num_hidden_layers * 4 * (met - seen) * config.model.hidden_size
    assert counter.get_total_flops() - count_flops(config).forward == beyond


def test_a_window_counts_the_positions_it_holds() -> None:
    whole, window = small_config(), small_config(model={"attention_window": 3})
    model, length = whole.model, whole.train.seq_length
    less = model.num_hidden_layers * 4 * length * (length - 3) * model.hidden_size
    assert count_flops(whole).fast_layers - count_flops(window).fast_layers == less
