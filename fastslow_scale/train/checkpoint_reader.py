"""Reads any checkpoint in one process: no engine, no process group, no matter which layout wrote it.

A rank's file holds flat pieces of its tensor-parallel shards, under `NAME|KIND|START`: elements [START, START + length)
of the flattened shard of parameter NAME. KIND is `fp32` (the master weight), `exp_avg` or `exp_avg_sq` (AdamW's
moments). `rank_state|NAME` is what else the rank gave.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from data_pipeline.errors import UserError
from fastslow_scale.train.checkpoint_files import read_manifest

WEIGHTS = "fp32"
MOMENTS = ("exp_avg", "exp_avg_sq")
_RANK_STATE = "rank_state"


class _Piece(NamedTuple):
    tp_rank: int
    start: int
    stop: int
    file: str
    key: str


def piece_key(name: str, kind: str, start: int) -> str:
    return f"{name}|{kind}|{start}"


def rank_state_key(name: str) -> str:
    return f"{_RANK_STATE}|{name}"


class CheckpointReader:
    """The tensors and the state of the checkpoint at `path`. Its checksums are `find_checkpoint`'s business.

    Raises:
        UserError: a file is missing or cannot be read; names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        self.state: dict[str, Any] = self.manifest["state"]
        self.step: int = self.manifest["step"]
        self.tp_size: int = self.manifest["layout"]["tp_size"]
        self.dp_size: int = self.manifest["layout"]["dp_size"]
        self._parameters: dict[str, Any] = self.manifest["parameters"]
        self._files = {name: self._open(name) for name in self.manifest["files"]}
        self._pieces: defaultdict[tuple[str, str], list[_Piece]] = defaultdict(list)
        for name, file in self._files.items():
            self._index(name, file)

    def names(self) -> list[str]:
        """The full names of all parameters, as the model orders them."""
        return sorted(self._parameters, key=lambda name: self._parameters[name]["index"])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole, unsharded parameter."""
        return tuple(self._parameters[name]["shape"])

    def is_trained(self, name: str) -> bool:
        return bool(self._parameters[name]["trained"])

    def adam_step(self, name: str) -> int | None:
        """How many steps AdamW took on the parameter; None: it never took one, and there are no moments."""
        step: int | None = self._parameters[name]["adam_step"]
        return step

    def full(self, name: str, kind: str = WEIGHTS) -> torch.Tensor:
        """The whole parameter or moment in float32, shape `shape(name)`. A moment that does not exist is zero."""
        shape = list(self.shape(name))
        tp_dim: int | None = self._parameters[name]["tp_dim"]
        if not self._has(name, kind):
            return torch.zeros(shape)
        if tp_dim is None:
            return self._shard(name, kind, 0, torch.Size(shape))
        shape[tp_dim] //= self.tp_size
        return torch.cat([self._shard(name, kind, rank, torch.Size(shape)) for rank in range(self.tp_size)], tp_dim)

    def local(
        self, name: str, kind: str, start: int, count: int, tp_dim: int | None, tp_rank: int, tp_size: int
    ) -> torch.Tensor:
        """Elements [start, start + count) of the flattened shard that `tp_rank` of `tp_size` holds, shape [count].

        The parameter is cut along `tp_dim`, or whole on every rank where that is None. Only the rows that these
        elements lie in are read; where the layout is the one that was saved, only the elements themselves.
        """
        if not self._has(name, kind):
            return torch.zeros(count)
        saved_dim: int | None = self._parameters[name]["tp_dim"]
        sources = 1 if saved_dim is None else self.tp_size
        parts = 1 if tp_dim is None else tp_size
        if sources == parts:
            return self._elements(name, kind, tp_rank, start, count)
        # Seen as [rows, row], shards are side by side in each row: `row` begins with the dimension that is cut.
        shape = self.shape(name)
        row = math.prod(shape[next(dim for dim in (saved_dim, tp_dim) if dim is not None) :])
        ours, theirs = row // parts, row // sources
        first, last = start // ours, -(-(start + count) // ours)
        low, high = (tp_rank % parts) * ours, (tp_rank % parts + 1) * ours
        if last - first == 1:
            low, high = low + start - first * ours, low + start + count - first * ours
        columns = []
        for source in range(low // theirs, -(-high // theirs)):
            left, right = max(low - source * theirs, 0), min(high - source * theirs, theirs)
            if last - first == 1:
                columns.append(self._elements(name, kind, source, first * theirs + left, right - left).view(1, -1))
            else:
                block = self._elements(name, kind, source, first * theirs, (last - first) * theirs)
                columns.append(block.view(last - first, theirs)[:, left:right])
        offset = 0 if last - first == 1 else start - first * ours
        return torch.cat(columns, dim=1).reshape(-1)[offset : offset + count]

    def rank_state(self, tp_rank: int, dp_rank: int) -> dict[str, torch.Tensor]:
        """What this rank gave to be saved beside the parameters."""
        prefix = rank_state_key("")
        return {
            key.removeprefix(prefix): self._files[name].get_tensor(key)
            for name, entry in self.manifest["files"].items()
            if (entry["tp_rank"], entry["dp_rank"]) == (tp_rank, dp_rank)
            for key in self._files[name].keys()  # noqa: SIM118 (no mapping)
            if key.startswith(prefix)
        }

    def _open(self, name: str) -> Any:
        try:
            return safe_open(self.path / name, "pt")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.path / name}: {error}") from error

    def _index(self, name: str, file: Any) -> None:
        tp_rank = self.manifest["files"][name]["tp_rank"]
        for key in file.keys():  # noqa: SIM118 (no mapping)
            if key.startswith(rank_state_key("")):
                continue
            parameter, kind, start = key.rsplit("|", 2)
            length = file.get_slice(key).get_shape()[0]
            self._pieces[parameter, kind].append(_Piece(tp_rank, int(start), int(start) + length, name, key))

    def _has(self, name: str, kind: str) -> bool:
        return kind == WEIGHTS or self.adam_step(name) is not None

    def _shard(self, name: str, kind: str, tp_rank: int, shape: torch.Size) -> torch.Tensor:
        return self._elements(name, kind, tp_rank, 0, shape.numel()).view(shape)

    def _elements(self, name: str, kind: str, tp_rank: int, start: int, count: int) -> torch.Tensor:
        """Of a flattened saved shard. A parameter that was whole on every rank was written by any one of them."""
        sharded = self._parameters[name]["tp_dim"] is not None
        elements, found = torch.empty(count), 0
        for piece in self._pieces[name, kind]:
            first, last = max(start, piece.start), min(start + count, piece.stop)
            if first < last and (not sharded or piece.tp_rank == tp_rank):
                source = self._files[piece.file].get_slice(piece.key)
                elements[first - start : last - start] = source[first - piece.start : last - piece.start]
                found += last - first
        if found != count:
            raise UserError(f"{self.path}: holds {found} of {count} elements of {name} ({kind})")
        return elements
