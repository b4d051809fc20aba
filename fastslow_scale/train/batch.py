"""From a data folder to what the model is asked: rows, inputs, labels, and how many labels count."""

from __future__ import annotations

import torch
import torch.distributed as dist

from data_pipeline.errors import UserError
from data_pipeline.folder import CacheSettings
from data_pipeline.mixture import Data, Mixture, sources_of
from data_pipeline.stream import TokenDataset
from fastslow_scale.config import Config, DataConfig
from fastslow_scale.model.loss import IGNORE
from fastslow_scale.parallel.mesh import Mesh


def open_data(config: Config) -> tuple[Data, Data]:
    """The train and the validation split, checked against the config."""
    train, validation = (open_split(config.data, split) for split in ("train", "validation"))
    if train.seq_length != config.train.seq_length:
        raise UserError(
            f"train.seq_length is {config.train.seq_length} but {train.location} was sharded with {train.seq_length}"
        )
    if train.vocab_size != config.model.vocab_size:
        raise UserError(
            f"model.vocab_size is {config.model.vocab_size} but the tokenizer of {train.location} "
            f"has {train.vocab_size} pieces"
        )
    return train, validation


def open_split(data: DataConfig, split: str) -> Data:
    """One split of the folder or of the mixture that `data` names. Raises `UserError`: it cannot be read."""
    cache = CacheSettings(data.cache_dir, data.cache_gb)
    if data.sources:
        sources = sources_of((source.path, source.weight, source.name) for source in data.sources)
        return Mixture.open(sources, split, on_error=data.on_error, cache=cache)
    if data.path is None:
        raise UserError("data.path is missing: name a folder written by `fastslow data shard`")
    return TokenDataset.open(data.path, split, on_error=data.on_error, cache=cache)


def inputs_and_labels(rows: torch.Tensor, pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, T + 1] stored tokens -> inputs [n, T] and the next tokens [n, T], IGNORE where a row is filled up."""
    labels = rows[:, 1:]
    return rows[:, :-1], labels.masked_fill(labels == pad_id, IGNORE)


def count_valid(labels: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Labels that count over all data-parallel ranks, at least 1, as a scalar on the mesh's device."""
    count = (labels != IGNORE).sum().to(mesh.device, torch.float32)
    dist.all_reduce(count, group=mesh.dp_group)
    return count.clamp(min=1)


def mean_loss(loss_sum: torch.Tensor, valid_tokens: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The step's mean loss over all data-parallel ranks, from each rank's sum: a scalar, the same on every rank."""
    mean = loss_sum.detach() / valid_tokens
    dist.all_reduce(mean, group=mesh.dp_group)
    return mean


def validation_rows(dataset: Data, limit: int, mesh: Mesh) -> torch.Tensor:
    """This rank's share of the first `limit` rows, filled up with empty rows so that every rank has equally many."""
    count = min(limit, dataset.num_samples)
    own = list(range(mesh.dp_rank, count, mesh.dp_size))
    share = -(-count // mesh.dp_size)
    empty = torch.full((share - len(own), dataset.seq_length + 1), dataset.pad_id, dtype=torch.int64)
    return torch.cat([dataset.rows(own), empty]) if own else empty
