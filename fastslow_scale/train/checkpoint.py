"""Saves and restores a DeepSpeed engine: fp32 masters, AdamW moments and counters, readable at any other layout.

A save has three parts: snapshot (a copy in host memory), write (files, no other rank needed) and commit (all ranks
agree, then one renames). Every rank writes what it alone holds; what several ranks hold is written by one of them.
`saver.Saver` does the last two in the background.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data_pipeline.errors import UserError
from fastslow_scale.parallel.mesh import Mesh
from fastslow_scale.parallel.sharing import sharded_dim
from fastslow_scale.train import checkpoint_files as files
from fastslow_scale.train.agreement import Ranks
from fastslow_scale.train.checkpoint_files import Found, find_checkpoint
from fastslow_scale.train.checkpoint_reader import MOMENTS, WEIGHTS, CheckpointReader, piece_key, rank_state_key
from fastslow_scale.train.host_buffers import HostBuffers
from fastslow_scale.train.zero_fragments import (
    EngineState,
    Fragment,
    read_counters,
    require_step_boundary,
    write_counters,
)

__all__ = ["CheckpointReader", "Found", "Restored", "find_checkpoint", "load_checkpoint", "save_checkpoint"]

_MANIFEST_ROOM = 1 << 20  # bytes, for the manifest and the headers of the files


class Restored(NamedTuple):
    """What the caller of `save_checkpoint` gave: for the run, and for this rank.

    `rank_state` is None where the number of tensor- or data-parallel ranks has changed since.
    """

    state: dict[str, Any]
    rank_state: dict[str, torch.Tensor] | None


@dataclass(frozen=True)
class Snapshot:
    """One rank's share of a checkpoint, in host memory, with what the manifest says of the whole."""

    manifest: dict[str, Any]
    file_name: str
    tensors: dict[str, torch.Tensor]
    elements: dict[str, int]  # how many of each kind are among the tensors

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def save_checkpoint(
    engine: Any,
    mesh: Mesh,
    folder: Path,
    step: int,
    state: Mapping[str, Any],
    keep: int,
    rank_state: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Saves `step` in `folder` (the run's checkpoints/), of which the `keep` newest stay. All ranks call it together.

    Args:
        state: JSON-able; rank 0's is saved.
        rank_state: this rank's own tensors, such as the state of its random number generators.

    Raises:
        UserError, RuntimeError: as `store`.
    """
    return store(lambda: take_snapshot(engine, mesh, step, state, rank_state or {}), mesh, Ranks(), folder, step, keep)


def store(
    snapshot_of: Callable[[], Snapshot],
    mesh: Mesh,
    ranks: Ranks,
    folder: Path,
    step: int,
    keep: int,
    keep_every: int = 0,
) -> Path:
    """Makes every rank's snapshot one durable checkpoint in `folder` and the newest there. All ranks call it together.

    Args:
        snapshot_of: gives this rank's share; what it raises counts as a failure of the save.

    Raises:
        UserError, RuntimeError: some rank failed. All ranks raise, naming that rank and its file; the older checkpoints
            and `latest` are as they were.
    """
    failure = f"the checkpoint of step {step} was not saved"
    saving = ranks.on_main(failure, lambda: files.begin(folder, step))
    try:
        snapshot = ranks.on_all(failure, snapshot_of)
        needed = sum(ranks.gather(snapshot.bytes)) + _MANIFEST_ROOM
        ranks.on_main(failure, lambda: files.require_space(folder, needed))
        entry = ranks.on_all(failure, lambda: write_snapshot(snapshot, mesh, saving))
        manifest = _with_files(snapshot.manifest, ranks.gather(entry))
        return ranks.on_main(failure, lambda: files.commit(saving, manifest, keep, keep_every))
    except (UserError, RuntimeError):
        if mesh.rank == 0:
            files.abandon(saving)
        raise


def find_together(folder: Path, resume: str) -> Found:
    """`find_checkpoint`, with the bytes to verify shared among all ranks, which call it together."""
    ranks = Ranks()
    paths = ranks.agree(lambda: files.candidates(folder, resume) if ranks.rank == 0 else [])[0]

    def check(path: Path) -> None:
        ranks.agree(lambda: files.verify(path, ranks.rank, ranks.count))

    return files.first_sound(folder, resume, paths, check)


@torch.no_grad()
def load_checkpoint(engine: Any, mesh: Mesh, path: Path) -> Restored:
    """Restores what `save_checkpoint` saved, at whatever layout and ZeRO stage. All ranks call it together.

    The learning rate and the other settings of the optimizer's groups are not restored.

    Raises:
        UserError: the checkpoint is of another model, or cannot be read; on all ranks, naming the parameter or file.
            The engine may be half loaded.
    """
    failure = f"the checkpoint {path} was not loaded"
    ranks = Ranks()
    reader = ranks.on_all(failure, lambda: CheckpointReader(path))
    engine_state = ranks.on_all(failure, lambda: _read_into(engine, mesh, reader))
    engine_state.push_masters()
    write_counters(engine, reader.manifest["engine"])
    same_layout = (reader.tp_size, reader.dp_size) == (mesh.tp_size, mesh.dp_size)
    return Restored(reader.state, reader.rank_state(mesh.tp_rank, mesh.dp_rank) if same_layout else None)


def take_snapshot(
    engine: Any,
    mesh: Mesh,
    step: int,
    state: Mapping[str, Any],
    rank_state: Mapping[str, torch.Tensor],
    buffers: HostBuffers | None = None,
) -> Snapshot:
    """Copies this rank's share into `buffers`; the engine may go on afterwards. Needs no other rank.

    Without buffers the snapshot holds the engine's own memory where that is what is to be written (fp32 on the CPU):
    the engine must stand still until it is written.
    """
    require_step_boundary(engine)
    engine_state = EngineState(engine)
    order = {name: index for index, name in enumerate(engine_state.parameters)}
    to_host = _on_host if buffers is None else buffers.copy
    tensors, elements = {}, dict.fromkeys((WEIGHTS, *MOMENTS), 0)
    for fragment, kind, key in _own_pieces(engine_state, mesh):
        view = engine_state.view(fragment, kind)
        if view is not None:
            tensors[key] = to_host(key, view, torch.float32)
            elements[kind] += fragment.count
    for name, tensor in rank_state.items():
        tensors[rank_state_key(name)] = to_host(rank_state_key(name), tensor, tensor.dtype)
    if buffers is not None:
        buffers.complete()
    manifest = {
        "step": step,
        "layout": {"tp_size": mesh.tp_size, "dp_size": mesh.dp_size, "zero_stage": engine.zero_optimization_stage()},
        "parameters": {name: _describe(name, index, engine_state, mesh.tp_size) for name, index in order.items()},
        "engine": read_counters(engine),
        "state": json.loads(json.dumps(state)),  # the caller's lists may change before this is written
    }
    return Snapshot(manifest, f"tp{mesh.tp_rank}_dp{mesh.dp_rank}.safetensors", tensors, elements)


def _on_host(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().to("cpu", dtype)


def reserve_buffers(engine: Any, mesh: Mesh, buffers: HostBuffers) -> None:
    """Makes room for this rank's share of every later snapshot, the moments that AdamW has not made yet included."""
    for fragment, _, key in _own_pieces(EngineState(engine), mesh):
        buffers.reserve(key, fragment.count)


def _own_pieces(engine_state: EngineState, mesh: Mesh) -> Iterator[tuple[Fragment, str, str]]:
    """Fragment, kind and key of all that this rank is the one to write."""
    order = {name: index for index, name in enumerate(engine_state.parameters)}
    for fragment in engine_state.fragments:
        if _is_writer(fragment, engine_state, mesh, order[fragment.name]):
            for kind in (WEIGHTS, *MOMENTS) if fragment.trained else (WEIGHTS,):
                yield fragment, kind, piece_key(fragment.name, kind, fragment.start)


def write_snapshot(snapshot: Snapshot, mesh: Mesh, saving: Path) -> dict[str, Any]:
    """Writes this rank's file, if it owns anything. Returns the manifest's `files` for it. Needs no other rank."""
    if not snapshot.tensors:
        return {}
    written = files.write_tensors(saving / snapshot.file_name, snapshot.tensors)
    place = {"tp_rank": mesh.tp_rank, "dp_rank": mesh.dp_rank, "elements": snapshot.elements}
    return {snapshot.file_name: {**written, **place}}


def _with_files(manifest: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The whole manifest. Raises RuntimeError unless the ranks together wrote every element once."""
    written = {name: entry for of_rank in entries for name, entry in of_rank.items()}
    for kind in (WEIGHTS, *MOMENTS):
        expected = sum(
            torch.Size(parameter["shape"]).numel()
            for parameter in manifest["parameters"].values()
            if kind == WEIGHTS or parameter["adam_step"] is not None
        )
        found = sum(entry["elements"][kind] for entry in written.values())
        if found != expected:
            raise RuntimeError(f"the ranks wrote {found} elements of {kind}, the model has {expected}")
    return {**manifest, "files": written}


def _read_into(engine: Any, mesh: Mesh, reader: CheckpointReader) -> EngineState:
    """Fills this rank's masters, moments and frozen weights; the model computes with them after `push_masters`."""
    engine_state = EngineState(engine)
    _require_same_model(engine_state, reader, mesh.tp_size)
    engine_state.set_adam_steps({name: reader.adam_step(name) for name in reader.names()})
    read_fragments(engine_state, mesh, reader, set(reader.names()), (WEIGHTS, *MOMENTS))
    return engine_state


def read_fragments(
    engine_state: EngineState, mesh: Mesh, reader: CheckpointReader, names: set[str], kinds: Sequence[str]
) -> None:
    """Fills what this rank holds of these parameters, and reads no more of the files than that."""
    for fragment in engine_state.fragments:
        tp_dim = sharded_dim(engine_state.parameters[fragment.name])
        for kind in kinds if fragment.trained else (WEIGHTS,):
            view = engine_state.view(fragment, kind)
            if view is not None and fragment.name in names:
                place = (fragment.start, fragment.count, tp_dim, mesh.tp_rank, mesh.tp_size)
                view.copy_(reader.local(fragment.name, kind, *place))


def _require_same_model(engine_state: EngineState, reader: CheckpointReader, tp_size: int) -> None:
    ours, theirs = set(engine_state.parameters), set(reader.names())
    if ours != theirs:
        missing, unknown = sorted(ours - theirs), sorted(theirs - ours)
        what = f"it lacks {missing[0]}" if missing else f"it has {unknown[0]}, which this model lacks"
        raise UserError(f"{reader.path} is of another model: {what}")
    for name in engine_state.parameters:
        shape = full_shape(name, engine_state, tp_size)
        if shape != reader.shape(name):
            raise UserError(f"{reader.path} is of another model: {name} is {reader.shape(name)} there, {shape} here")
        if engine_state.is_trained(name) != reader.is_trained(name):
            there, here = ("trained", "frozen") if reader.is_trained(name) else ("frozen", "trained")
            raise UserError(f"{reader.path} is of another variant: {name} is {there} there, {here} here")


def _describe(name: str, index: int, engine_state: EngineState, tp_size: int) -> dict[str, Any]:
    return {
        "index": index,
        "shape": full_shape(name, engine_state, tp_size),
        "tp_dim": _tp_dim(name, engine_state),
        "trained": engine_state.is_trained(name),
        "adam_step": engine_state.adam_step(name),
    }


def full_shape(name: str, engine_state: EngineState, tp_size: int) -> tuple[int, ...]:
    """The shape of the whole parameter, not cut over ranks."""
    shape, tp_dim = list(engine_state.local_shape(name)), _tp_dim(name, engine_state)
    if tp_dim is not None:
        shape[tp_dim] *= tp_size
    return tuple(shape)


def _tp_dim(name: str, engine_state: EngineState) -> int | None:
    """The dimension that tensor-parallel ranks cut, each into one contiguous slice."""
    parameter = engine_state.parameters[name]
    tp_dim, stride = sharded_dim(parameter), getattr(parameter, "partition_stride", 1)
    if tp_dim is not None and stride != 1:
        raise RuntimeError(f"{name} has partition_stride {stride}: only contiguous slices can be saved")
    return tp_dim


def _is_writer(fragment: Fragment, engine_state: EngineState, mesh: Mesh, index: int) -> bool:
    """Whether this rank is the one to write the fragment. What several hold goes around among them by `index`."""
    replicated = _tp_dim(fragment.name, engine_state) is None
    return (not replicated or index % mesh.tp_size == mesh.tp_rank) and (
        not fragment.on_every_dp_rank or index // mesh.tp_size % mesh.dp_size == mesh.dp_rank
    )
