"""Asks a trained model what its slow path does: its losses as it is, with closed gates, with swapped slow states."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch

from data_pipeline.errors import UserError
from data_pipeline.mixture import Data
from fastslow_scale.config import Config
from fastslow_scale.model.coupling import Exchange
from fastslow_scale.model.documents import Documents
from fastslow_scale.model.loss import IGNORE
from fastslow_scale.model.model import FastSlowModel
from fastslow_scale.train.batch import inputs_and_labels


@dataclass(frozen=True)
class HeldOut:
    """Held-out sequences, in batches of at least two.

    Attributes:
        tokens, labels: [B, T] each.
        documents: what keeps their documents apart, or None.
    """

    batches: list[tuple[torch.Tensor, torch.Tensor, Documents | None]]

    @classmethod
    def read(cls, data: Data, config: Config, device: torch.device, limit: int, batch_size: int = 16) -> HeldOut:
        """The first `limit` sequences of a split, or all; one less where a single one would be left over.

        Raises:
            UserError: there are fewer than two.
        """
        count = min(limit, data.num_samples)
        tokens, labels = inputs_and_labels(data.rows(list(range(count))).long(), data.pad_id)
        batches = []
        for part, targets in zip(tokens.split(batch_size), labels.split(batch_size), strict=True):
            if len(part) > 1:
                part = part.to(device)
                documents = Documents.of_tokens(part, data.eos_id) if config.data.reset_at_document else None
                batches.append((part, targets.to(device), documents))
        if not batches:
            raise UserError(f"a study measures on at least 2 validation sequences (got {count})")
        return cls(batches)

    @property
    def sequences(self) -> int:
        return sum(len(tokens) for tokens, _, _ in self.batches)


def exchanges_of(model: FastSlowModel) -> list[Exchange]:
    return [cast(Exchange, exchange) for exchange in model.exchanges]


@torch.no_grad()
def losses(model: FastSlowModel, held_out: HeldOut) -> torch.Tensor:
    """The loss of every token, [N, T] in nats; nan where there is no label."""
    found = []
    for tokens, labels, documents in held_out.batches:
        each = model.token_losses(tokens, labels, documents).float()
        found.append(each.masked_fill(labels == IGNORE, float("nan")).cpu())
    return torch.cat(found)


@contextlib.contextmanager
def closed_gates(model: FastSlowModel) -> Iterator[None]:
    """Nothing comes back from the slow path."""
    gates = [exchange.gate.data for exchange in exchanges_of(model)]
    before = [gate.clone() for gate in gates]
    for gate in gates:
        gate.zero_()
    try:
        yield
    finally:
        for gate, value in zip(gates, before, strict=True):
            gate.copy_(value)


@contextlib.contextmanager
def swapped_states(model: FastSlowModel) -> Iterator[None]:
    """What comes back from the slow path is another sequence's."""
    before = [exchange.shuffled for exchange in exchanges_of(model)]
    for exchange in exchanges_of(model):
        exchange.shuffled = True
    try:
        yield
    finally:
        for exchange, value in zip(exchanges_of(model), before, strict=True):
            exchange.shuffled = value


@torch.enable_grad()
def tiny_gradients(
    model: FastSlowModel, held_out: HeldOut, below: tuple[float, ...] = (1e-8, 1e-15)
) -> dict[str, float]:
    """Of the trained slow weights' gradients of the mean loss of one batch: which share is smaller than each limit.

    AdamW divides by |g| + eps once it has settled: a gradient below its eps hardly moves its weight.
    """
    trained = [p for name, p in model.exchanges.named_parameters() if p.requires_grad and not name.endswith(".gate")]
    if not trained:
        return {}
    tokens, labels, documents = held_out.batches[0]
    loss = model(tokens, labels, documents) / (labels != IGNORE).sum()
    gradients = torch.cat([g.flatten().abs() for g in torch.autograd.grad(loss, trained)])
    return {f"{limit:g}": (gradients < limit).double().mean().item() for limit in below}
