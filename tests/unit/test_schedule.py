"""Learning rates against values worked out by hand, and the parameter groups."""

from __future__ import annotations

import math

import pytest

from fastslow_scale.model.model import build_model
from fastslow_scale.parallel.mesh import single_process_mesh
from fastslow_scale.train.optimizer import parameter_groups
from fastslow_scale.train.schedule import learning_rate
from tests.configs import small_config

pytestmark = pytest.mark.unit


def rates(kind: str, **schedule: object) -> list[float]:
    config = small_config(
        schedule={"kind": kind, "min_lr_ratio": 0.1, **schedule}, train={"max_steps": 14}, optimizer={"lr": 2.0}
    )
    return [learning_rate(config, step) for step in range(15)]


def test_warm_up_is_linear_and_reaches_the_top() -> None:
    assert rates("cosine", warmup_steps=4)[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_cosine_ends_at_the_floor() -> None:
    got = rates("cosine", warmup_steps=4)
    assert got[9] == pytest.approx(0.2 + 1.8 * 0.5)  # half way: the cosine is zero
    assert got[6] == pytest.approx(0.2 + 0.9 * (1 + math.cos(math.pi * 0.2)))
    assert got[14] == pytest.approx(0.2)


def test_wsd_holds_and_then_falls_linearly() -> None:
    got = rates("wsd", warmup_steps=4, decay_fraction=0.5)
    assert got[4:10] == pytest.approx([2.0] * 6)
    assert got[10:15] == pytest.approx([0.2 + 1.8 * left for left in (0.8, 0.6, 0.4, 0.2, 0.0)])


def test_constant_stays() -> None:
    assert rates("constant", warmup_steps=2)[2:] == pytest.approx([2.0] * 13)


def test_warm_up_in_tokens_equals_warm_up_in_steps() -> None:
    per_step = 18 * 8
    assert rates("cosine", warmup_tokens=4 * per_step) == rates("cosine", warmup_steps=4)


def test_parameter_groups() -> None:
    config = small_config(
        optimizer={"lr": 1.0, "eps": 1e-8, "weight_decay": 0.1},
        slow={"lr_multiplier": 3.0, "gate_lr_multiplier": 10.0, "eps": 1e-15},
    )
    groups = {group["name"]: group for group in parameter_groups(build_model(config, single_process_mesh()), config)}
    settings = {name: (g["lr"], g["eps"], g["weight_decay"]) for name, g in groups.items()}
    assert settings == {
        "fast.decay": (1.0, 1e-8, 0.1),
        "fast.no_decay": (1.0, 1e-8, 0.0),
        "slow.decay": (3.0, 1e-15, 0.1),
        "slow.no_decay": (3.0, 1e-15, 0.0),
        "gate.no_decay": (10.0, 1e-15, 0.0),
    }
    assert all(p.ndim == 2 for name in ("fast.decay", "slow.decay") for p in groups[name]["params"])
    assert len(groups["gate.no_decay"]["params"]) == 2
