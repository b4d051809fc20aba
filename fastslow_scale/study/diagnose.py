"""What a trained slow path does on held-out text: the numbers that docs/theory.md calls gaps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from data_pipeline.errors import UserError
from fastslow_scale.inference.load import load_model
from fastslow_scale.inference.loaded import Loaded
from fastslow_scale.model.coupling import Exchange
from fastslow_scale.model.model import FastSlowModel, build_model
from fastslow_scale.parallel.mesh import single_process_mesh
from fastslow_scale.study.probe import HeldOut, closed_gates, losses, swapped_states
from fastslow_scale.study.statistics import Comparison, compare
from fastslow_scale.train.batch import open_data

SEQUENCES = 64
RIDGE = 1e-3
"""Regularisation of the probe, relative to the mean variance of what it reads."""


@dataclass(frozen=True)
class ExchangeFound:
    """One exchange. Norms are Euclidean, over the hidden size.

    Attributes:
        contribution: |c_t| / |x_t| by position, [T], mean over sequences; zero in the first block.
        x_rate: mean |x_{t+1} - x_t| / |x_t|, the change of the fast state per token.
        y_rate: mean |y_{b+1} - y_b| / |y_b|, the change of the slow state per block.
        phi_r2: share of the variance of x_t that a linear map of phi(y) at its block predicts, on sequences that the
            map was not fitted to.
        pooled_r2: the same from the pooled tokens p instead of phi(y): what the path was given to work with.
        spectrum: variances of the pooled tokens along their principal axes, as shares of the whole, falling.
    """

    contribution: torch.Tensor
    x_rate: float
    y_rate: float
    phi_r2: float
    pooled_r2: float
    spectrum: torch.Tensor

    def timescale_ratio(self, pool_size: int) -> float:
        """Change of y per token over change of x per token; the equations have eps = 1/P in its place."""
        return self.y_rate / pool_size / self.x_rate

    @property
    def effective_rank(self) -> float:
        """exp of the spectrum's entropy (Roy and Vetterli, EUSIPCO 2007): how many directions carry variance."""
        shares = self.spectrum[self.spectrum > 0]
        return float((-(shares * shares.log()).sum()).exp())


@dataclass(frozen=True)
class Diagnosis:
    """Everything measured on one checkpoint.

    Attributes:
        loss: held-out, nats a token, over `sequences` sequences of `length` tokens.
        closed, swapped, doubled: what the loss rises by with the gates at zero, with slow states of another sequence,
            with twice the pool size; paired over sequences. `doubled` is None where such blocks do not fit.
        by_position: loss at each position, [T]; by_place: at each place in a block, [P], first block left out.
        closed_by_position: what closing the gates costs at each position, [T].
    """

    checkpoint: Path
    notes: list[str]
    variant: str
    pool_size: int
    exchange_after: list[int]
    sequences: int
    loss: float
    closed: Comparison
    swapped: Comparison
    doubled: Comparison | None
    by_position: torch.Tensor
    closed_by_position: torch.Tensor
    by_place: torch.Tensor
    exchanges: list[ExchangeFound]


def diagnose(run: Path | str, limit: int = SEQUENCES) -> Diagnosis:
    """Measure the newest sound checkpoint of a run folder, or the checkpoint named, on its validation split.

    Raises:
        UserError: no such run, its data is gone, or it has no slow path or no complete block to measure.
    """
    loaded = load_model(run)
    config, model = loaded.config, loaded.model
    if config.data.path is None and not config.data.sources:
        raise UserError(f"{run} does not say what it was trained on: only a run can be diagnosed, not an export")
    if not model.exchanges:
        raise UserError(f"{run} is a run of variant {config.model.variant}: it has no slow path to diagnose")
    if config.train.seq_length <= config.slow.pool_size:
        raise UserError(
            f"{run}: its sequences of {config.train.seq_length} tokens hold no block of use to a later token"
        )
    _, validation = open_data(config)
    device = next(model.parameters()).device
    held_out = HeldOut.read(validation, config, device, limit)
    if held_out.sequences < 4:
        raise UserError(f"{validation.location} holds out too few sequences to measure anything: {held_out.sequences}")
    with recorded(model) as records:
        whole = losses(model, held_out)
    with closed_gates(model):
        closed = losses(model, held_out)
    with swapped_states(model):
        swapped = losses(model, held_out)
    twice = 2 * config.slow.pool_size
    doubled = losses(with_pool_size(loaded, twice), held_out) if config.train.seq_length > twice else None
    by_position, pool_size = whole.double().nanmean(dim=0), config.slow.pool_size
    blocks = whole.shape[1] // pool_size
    by_place = whole[:, pool_size : blocks * pool_size].unflatten(1, (-1, pool_size)).double()
    return Diagnosis(
        checkpoint=loaded.checkpoint,
        notes=loaded.notes,
        variant=config.model.variant,
        pool_size=pool_size,
        exchange_after=list(config.slow.exchange_after),
        sequences=held_out.sequences,
        loss=whole.double().nanmean().item(),
        closed=rise(closed, whole),
        swapped=rise(swapped, whole),
        doubled=rise(doubled, whole) if doubled is not None else None,
        by_position=by_position,
        closed_by_position=closed.double().nanmean(dim=0) - by_position,
        by_place=by_place.nanmean(dim=(0, 1)) if by_place.numel() else torch.full((pool_size,), float("nan")),
        exchanges=[examine(record, pool_size) for record in records],
    )


def rise(changed: torch.Tensor, whole: torch.Tensor) -> Comparison:
    """Losses [N, T] with and without a change -> the rise of a sequence's mean loss, paired over sequences."""
    differences = (changed - whole).double().nanmean(dim=1)
    return compare(differences[~differences.isnan()].tolist(), margin=0.01)


def with_pool_size(loaded: Loaded, pool_size: int) -> FastSlowModel:
    """The same weights with other blocks: no weight's shape knows the pool size."""
    tree = loaded.config.model_dump()
    tree["slow"]["pool_size"] = pool_size
    model = build_model(type(loaded.config).model_validate(tree), single_process_mesh(), torch.float32)
    model.load_state_dict(loaded.model.state_dict())
    return model.to(next(loaded.model.parameters()).device).eval()


@dataclass(frozen=True)
class Record:
    """What passed through one exchange, a list entry per batch: x and x + c [T, B, D], p and phi [S, B, D], y."""

    x: list[torch.Tensor]
    after: list[torch.Tensor]
    p: list[torch.Tensor]
    y: list[torch.Tensor]
    phi: list[torch.Tensor]


@contextlib.contextmanager
def recorded(model: FastSlowModel) -> Iterator[list[Record]]:
    """While it is entered, keep what passes through each exchange."""
    records = [Record([], [], [], [], []) for _ in model.exchanges]
    hooks: list[RemovableHandle] = []

    def keep(record: Record) -> None:
        exchange: Exchange = model.exchanges[len(hooks) // 3]  # type: ignore[assignment]

        def at_exchange(_: nn.Module, given: tuple[torch.Tensor, ...], found: tuple[torch.Tensor, ...]) -> None:
            record.x.append(given[0].cpu())
            record.after.append(found[0].cpu())
            record.y.append(found[1].cpu())

        def at_pool_norm(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            record.p.append(given[0].cpu())

        def at_phi_down(_: nn.Module, given: tuple[torch.Tensor, ...], found: torch.Tensor) -> None:
            record.phi.append(found.cpu())

        hooks.append(exchange.register_forward_hook(at_exchange))
        hooks.append(exchange.pool_norm.register_forward_pre_hook(at_pool_norm))
        hooks.append(exchange.phi_down.register_forward_hook(at_phi_down))

    for record in records:
        keep(record)
    try:
        yield records
    finally:
        for hook in hooks:
            hook.remove()


def examine(record: Record, pool_size: int) -> ExchangeFound:
    """Turn what passed through an exchange into its numbers."""
    x, after, p, y, phi = (torch.cat(parts, dim=1).double() for parts in vars(record).values())
    contribution = ((after - x).norm(dim=-1) / x.norm(dim=-1)).mean(dim=1)
    served = x[pool_size : pool_size * p.shape[0] + pool_size]
    source = torch.arange(served.shape[0]) // pool_size
    pooled = p.flatten(0, 1)
    variances = torch.linalg.eigvalsh(torch.cov(pooled.t())).flip(0).clamp(min=0)
    return ExchangeFound(
        contribution=contribution,
        x_rate=rate_of_change(x),
        y_rate=rate_of_change(y),
        phi_r2=probe_r2(phi[source], served),
        pooled_r2=probe_r2(p[source], served),
        spectrum=variances / variances.sum(),
    )


def rate_of_change(states: torch.Tensor) -> float:
    """Mean |s_{t+1} - s_t| / |s_t| of states [n, B, D]; nan for a single one."""
    return ((states[1:] - states[:-1]).norm(dim=-1) / states[:-1].norm(dim=-1)).mean().item()


def probe_r2(read: torch.Tensor, target: torch.Tensor) -> float:
    """Fit `target` [n, B, D] linearly (ridge) from `read` [n, B, E] on the even sequences; R² on the odd ones.

    R² = 1 - sum of squared errors / sum of squared distances from the fitted sequences' mean, over all components.
    """
    fit_from, fit_to = (t[:, 0::2].flatten(0, 1) for t in (read, target))
    test_from, test_to = (t[:, 1::2].flatten(0, 1) for t in (read, target))
    center_from, center_to = fit_from.mean(dim=0), fit_to.mean(dim=0)
    a, b = fit_from - center_from, fit_to - center_to
    products = a.t() @ a
    ridge = RIDGE * products.diagonal().mean().clamp(min=1e-300) * torch.eye(len(products), dtype=products.dtype)
    weights = torch.linalg.solve(products + ridge, a.t() @ b)
    error = (test_to - center_to) - (test_from - center_from) @ weights
    return 1 - (error.square().sum() / (test_to - center_to).square().sum()).item()
