"""What is asked of a trained slow path, on models and states whose answers are known."""

from __future__ import annotations

import math

import pytest
import torch

from fastslow_scale.model.documents import Documents
from fastslow_scale.model.model import FastSlowModel, build_model
from fastslow_scale.parallel.mesh import single_process_mesh
from fastslow_scale.study.diagnose import Record, examine, probe_r2, rate_of_change
from fastslow_scale.study.probe import HeldOut, closed_gates, losses, swapped_states, tiny_gradients
from tests import reference
from tests.configs import small_config
from tests.parallel.layouts import open_gates, tokens_of

pytestmark = pytest.mark.unit

CONFIG = small_config()


def opened(**changes: dict[str, object]) -> FastSlowModel:
    model = build_model(small_config(**changes), single_process_mesh(), torch.float64)
    open_gates(model)
    return model


def logits_with_states_of(model: FastSlowModel, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Logits of `own` [1, T] where each exchange gives it what it would give to `other` [1, T].

    The second row of a batch of two: it hears of the first. The first row's own states do not matter to it.
    """
    with swapped_states(model), torch.no_grad():
        return model.logits(torch.cat([other, own]))[1]


def test_a_swapped_sequence_hears_only_of_its_neighbour() -> None:
    model = opened(slow={"exchange_after": [1]})
    first, second, third = (tokens_of(CONFIG, 1, seed)[:, :-1] for seed in (1, 2, 3))
    swapped = logits_with_states_of(model, second, first)
    assert not torch.equal(swapped, logits_with_states_of(model, second, third))
    with torch.no_grad():
        own = model.logits(torch.cat([first, second]))[1]
    assert torch.equal(logits_with_states_of(model, second, second), own), "its own state, by way of a twin"
    assert not torch.equal(swapped, own)
    block = CONFIG.slow.pool_size
    assert torch.equal(swapped[:block], own[:block]), "the first block receives nothing"


def test_shuffled_is_the_variant_that_trains_swapped() -> None:
    tokens = tokens_of(CONFIG, 3, 0)[:, :-1]
    trained, coupled = opened(model={"variant": "shuffled"}), opened()
    with torch.no_grad(), swapped_states(coupled):
        assert torch.equal(trained.logits(tokens), coupled.logits(tokens))
    with torch.no_grad():
        assert not torch.equal(trained.logits(tokens), coupled.logits(tokens))
    parameters = [{name: p.requires_grad for name, p in model.named_parameters()} for model in (trained, coupled)]
    assert parameters[0] == parameters[1]


def test_a_sequence_that_is_alone_hears_nothing() -> None:
    model, tokens = opened(model={"variant": "shuffled"}), tokens_of(CONFIG, 1, 0)[:, :-1]
    dense = small_config(model={"variant": "dense"})
    weights = {name: p.detach() for name, p in model.named_parameters() if not name.startswith("exchanges.")}
    with torch.no_grad():
        expected = reference.logits(weights, dense, tokens)
        torch.testing.assert_close(model.logits(tokens), expected, rtol=1e-12, atol=1e-12)


def test_closed_gates_are_the_dense_model_and_open_again_afterwards() -> None:
    model, tokens = opened(), tokens_of(CONFIG, 2, 0)[:, :-1]
    dense = build_model(small_config(model={"variant": "dense"}), single_process_mesh(), torch.float64)
    with torch.no_grad():
        before = model.logits(tokens)
        with closed_gates(model):
            assert torch.equal(model.logits(tokens), dense.logits(tokens))
        assert torch.equal(model.logits(tokens), before)


def held_out(count: int, documents: bool = False) -> HeldOut:
    rows = tokens_of(CONFIG, count, 4)
    labels = rows[:, 1:].clone()
    labels[0, 3:6] = -100
    return HeldOut([(rows[:, :-1], labels, Documents.of_tokens(rows[:, :-1], 0) if documents else None)])


@pytest.mark.parametrize("apart", [False, True])
def test_losses_are_the_references(apart: bool) -> None:
    model, asked = opened(), held_out(3, apart)
    (tokens, labels, _) = asked.batches[0]
    weights = {name: p.detach() for name, p in model.named_parameters()}
    found = losses(model, asked)
    numbers = reference.documents_of(tokens, 0) if apart else None
    expected = reference.loss_sum(weights, CONFIG, tokens, labels, numbers)
    assert found.nansum().item() == pytest.approx(expected.item(), rel=1e-6)
    assert found.isnan().sum() == 3


def test_the_share_of_tiny_gradients() -> None:
    shut = build_model(CONFIG, single_process_mesh(), torch.float64)
    assert tiny_gradients(shut, held_out(2)) == {"1e-08": 1.0, "1e-15": 1.0}, "a closed gate lets no gradient through"
    model, asked = opened(), held_out(2)
    share = tiny_gradients(model, asked, below=(1e-4,))["0.0001"]
    (tokens, labels, _) = asked.batches[0]
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    (reference.loss_sum(weights, CONFIG, tokens, labels) / (labels != -100).sum()).backward()
    slow = [w.grad for n, w in weights.items() if n.startswith("exchanges.") and not n.endswith("gate")]
    gradients = torch.cat([g.flatten().abs() for g in slow if g is not None])
    assert share == pytest.approx((gradients < 1e-4).double().mean().item(), abs=2e-4)
    assert 0 < share < 1
    assert tiny_gradients(opened(model={"variant": "frozen"}), asked) == {}


def test_rates_of_change() -> None:
    growing = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(4, 1, 1).expand(4, 2, 3)
    assert rate_of_change(growing) == pytest.approx(1.0)
    still = torch.ones(4, 2, 3)
    assert rate_of_change(still) == 0.0
    assert math.isnan(rate_of_change(torch.ones(1, 2, 3)))


def test_the_probe_finds_a_linear_map_and_nothing_in_noise() -> None:
    lot = torch.Generator().manual_seed(0)
    read = torch.randn(50, 20, 6, generator=lot, dtype=torch.float64)
    mapped = read @ torch.randn(6, 4, generator=lot, dtype=torch.float64) + 3.0
    assert probe_r2(read, mapped) == pytest.approx(1.0, abs=1e-5)
    noise = torch.randn(50, 20, 4, generator=lot, dtype=torch.float64)
    assert probe_r2(read, noise) == pytest.approx(0.0, abs=0.05)
    assert probe_r2(read, mapped + mapped.std() * noise) == pytest.approx(0.5, abs=0.1)


def test_an_exchange_in_numbers() -> None:
    lot = torch.Generator().manual_seed(0)
    size, blocks, batch, hidden, rank = 4, 8, 64, 12, 3
    length = size * blocks + 2

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=lot, dtype=torch.float64)

    x = normal(length, batch, hidden)
    added = 0.1 * x * (torch.arange(length) >= size).view(-1, 1, 1)
    p = normal(blocks, batch, rank) @ torch.linalg.qr(normal(hidden, rank))[0].t()
    y = torch.ones(blocks, batch, 5, dtype=torch.float64) * 2.0 ** torch.arange(blocks).view(-1, 1, 1)
    found = examine(Record([x], [x + added], [p], [y], [normal(blocks, batch, hidden)]), size)
    assert found.contribution[:size].tolist() == [0.0] * size
    assert found.contribution[size:].tolist() == pytest.approx([0.1] * (length - size))
    assert found.effective_rank == pytest.approx(rank, rel=0.02)
    assert found.spectrum.sum().item() == pytest.approx(1.0)
    assert found.y_rate == pytest.approx(1.0)
    assert found.timescale_ratio(size) == pytest.approx(1 / size / found.x_rate)
    assert found.phi_r2 == pytest.approx(0.0, abs=0.05)
