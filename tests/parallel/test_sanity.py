"""Replicas that drift apart stop the run; the ledger counts what the formula says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastslow_scale.config import Config
from fastslow_scale.model.communication import exchange_traffic, step_traffic
from fastslow_scale.model.model import build_model
from fastslow_scale.parallel.ledger import Entries, Ledger
from fastslow_scale.parallel.sanity import ReplicasDiffer, check_training_state
from fastslow_scale.parallel.sharing import sharded_dim
from fastslow_scale.train.batch import count_valid, mean_loss
from fastslow_scale.train.engine import BUCKET_ELEMENTS, Engine
from fastslow_scale.train.loop import agreed_signal
from fastslow_scale.train.optimizer import parameter_groups
from tests.configs import small_config
from tests.parallel.layouts import Layout, meshes, tokens_of
from tests.parallel.test_layouts import FOUR_HEADS, TRAINED
from tests.ranks import run_ranks

pytestmark = pytest.mark.parallel


def disturb(case: tuple[Config, Layout]) -> dict[str, str]:
    """What the check says, by what was changed by one bit on rank 1 of two tensor- x two data-parallel ranks."""
    (config, mesh), *_ = meshes([case])
    model = build_model(config, mesh)
    weights = dict(model.named_parameters())

    def complaint(states: dict[str, torch.Tensor]) -> str:
        try:
            check_training_state(weights, states, mesh)
        except ReplicasDiffer as error:
            return str(error)
        return ""

    state = torch.arange(6.0).view(3, 2)
    said = {"nothing": complaint({"slow state": state})}
    for name in ("norm.weight", "exchanges.0.gate", "layers.0.mlp.down_proj.weight"):
        original = weights[name].detach().clone()
        if mesh.rank == 1:
            weights[name].data.view(-1).view(torch.int32)[-1] ^= 1
        said[name] = complaint({"slow state": state})
        weights[name].data.copy_(original)
    if mesh.rank == 1:
        state[2, 1] = -state[2, 1]
    said["slow state"] = complaint({"slow state": state})
    return said


def test_one_changed_bit_is_named_with_its_ranks() -> None:
    sharded = "layers.0.mlp.down_proj.weight"
    for said in run_ranks(4, disturb, (TRAINED, Layout(tp=2, sp=True))):
        assert said["nothing"] == ""
        for name in ("norm.weight", "exchanges.0.gate"):
            over_dp, over_tp = said[name].split("; ")
            assert over_dp == f"{name} differs over data-parallel ranks: [3] from 1"
            assert over_tp == f"{name} differs over tensor-parallel ranks: [1] from 0"
        # Ranks 1 and 3 hold the same part of a sharded weight; 0 and 2 the other one.
        assert said[sharded] == f"{sharded} differs over data-parallel ranks: [3] from 1"
        assert said["slow state"] == "slow state differs over tensor-parallel ranks: [1] from 0"


THREE_EXCHANGES = small_config(
    model=FOUR_HEADS, train={"global_batch_size": 16, "seq_length": 15}, slow={"exchange_after": [1, 2, 3]}
)
DENSE = small_config(model=FOUR_HEADS | {"variant": "dense"}, train={"global_batch_size": 16})
BF16 = small_config(model=FOUR_HEADS, train={"global_batch_size": 16, "dtype": "bf16"})
LEDGER_CASES = [
    (config, Layout(tp, sp, zero, size))
    for tp, sp in ((1, False), (2, False), (2, True))
    for config, zero, size in ((TRAINED, 0, 4), (DENSE, 1, 2), (THREE_EXCHANGES, 2, 2), (BF16, 1, 4), (BF16, 2, 2))
] + [(THREE_EXCHANGES, Layout(4, True, 1, 4))]


def count(cases: list[tuple[Config, Layout]]) -> list[tuple[Entries, Entries]]:
    """Counted and predicted traffic of one step, per case."""
    results = []
    for config, mesh in meshes(cases):
        model = build_model(config, mesh)
        groups = [sum(p.numel() for p in group["params"]) for group in parameter_groups(model, config)]
        engine = Engine(model, config, mesh)
        rows = tokens_of(config, config.train.global_batch_size, 0).chunk(mesh.dp_size)[mesh.dp_rank]

        def step(engine: Engine = engine, rows: torch.Tensor = rows, config: Config = config, mesh: Any = mesh) -> None:
            valid = count_valid(rows[:, 1:], mesh)
            for part in rows.split(config.train.micro_batch_size):
                loss = engine.forward(part[:, :-1], part[:, 1:])
                engine.backward(loss, valid)
            mean_loss(loss, valid, mesh)
            agreed_signal(0, mesh)

        step()
        with Ledger(mesh) as ledger:
            step()
        results.append((ledger.entries, step_traffic(config, groups, mesh.dp_size, BUCKET_ELEMENTS)))
    return results


def test_the_ledger_equals_the_formula() -> None:
    for results in run_ranks(4, count, LEDGER_CASES, timeout=300):
        for case, (counted, predicted) in zip(LEDGER_CASES, results, strict=True):
            assert counted == predicted, case


def test_the_slow_path_adds_two_small_all_reduces_per_exchange() -> None:
    config = Layout(tp=2, sp=True).of(small_config(model=FOUR_HEADS))
    blocks, batch, hidden = 18 // 4, 2, 16
    [(key, traffic)] = exchange_traffic(config).items()
    assert key == ("tp", "all_reduce")
    assert traffic.calls == 2 * len(config.slow.exchange_after)
    assert traffic.bytes == 2 * len(config.slow.exchange_after) * blocks * batch * hidden * 4


def test_declarations_of_every_weight() -> None:
    from fastslow_scale.parallel.mesh import single_process_mesh
    from fastslow_scale.parallel.sanity import check_declarations

    model = build_model(small_config(), single_process_mesh())
    check_declarations(model)
    weight = model.layers[0].self_attn.qkv_proj.weight
    assert sharded_dim(weight) == 0
    weight.tensor_model_parallel = False
    with pytest.raises(AssertionError, match=r"layers\.0\.self_attn\.qkv_proj\.weight declares dimension None, not 0"):
        check_declarations(model)
