"""Checkpoints as files: a kill at any moment leaves the old or the new one, and every byte is checked before use.

    checkpoints/
        latest                       the name of the newest checkpoint, for people and scripts
        step_00000100/
            manifest.json            what there is, with the size and SHA-256 of every file, and its own checksum
            tp0_dp0.safetensors      one for each rank that owns something

A folder is filled under another name (`.saving`) and renamed once it is durable. `.deleting` is a folder on its way
out; `.replaced` is one whose step has been saved again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from data_pipeline.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
LATEST = "latest"

_SAVING, _DELETING, _REPLACED = ".saving", ".deleting", ".replaced"
_NAME = re.compile(rf"step_(\d{{8,}})({re.escape(_REPLACED)})?")
_CHUNK = 4 << 20
_LOG = logging.getLogger(__name__)


class Found(NamedTuple):
    """The checkpoint to resume from (None: a fresh start) and the newer ones passed over, each with the reason."""

    path: Path | None
    passed_over: list[tuple[Path, str]]


def find_checkpoint(folder: Path, resume: str = "auto") -> Found:
    """The newest sound checkpoint in `folder` (`auto`), none (`never`), or the one that `resume` names.

    Newest is the one saved last, also after a return to an earlier step. Every byte is read, so one rank should ask for
    all.

    Raises:
        UserError: the named checkpoint is damaged, or there are checkpoints and none is sound. Names the damaged file.
    """
    if resume == "never":
        return Found(None, [])
    if resume != "auto":
        if not Path(resume).is_dir():
            raise UserError(f"--resume {resume}: no such checkpoint; give auto, never, or a checkpoint's folder")
        verify(Path(resume))
        return Found(Path(resume), [])
    passed_over: list[tuple[Path, str]] = []
    for path in _newest_first(folder):
        try:
            verify(path)
        except UserError as damage:
            passed_over.append((path, str(damage)))
        else:
            return Found(path, passed_over)
    if passed_over:
        raise UserError(f"no checkpoint in {folder} is sound: " + "; ".join(reason for _, reason in passed_over))
    return Found(None, [])


def verify(path: Path) -> None:
    """Raises UserError, naming the file, unless every file of the checkpoint is there as it was written."""
    files: dict[str, Any] = read_manifest(path)["files"]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the interpreter lock
        for _ in pool.map(lambda name: _verify_file(path / name, files[name]), sorted(files)):
            pass


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`. Raises UserError: it is missing, damaged, or of another format."""
    file = path / MANIFEST
    try:
        text = file.read_bytes().decode()
        manifest: dict[str, Any] = json.loads(text)
        del manifest["checksum"]
        sound = text == _encode(manifest)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: damaged ({error})") from error
    if not sound:
        raise UserError(f"{file}: damaged (its checksum does not fit)")
    if manifest["format"] != FORMAT:
        raise UserError(f"{file}: has format {manifest['format']}, this version reads format {FORMAT}")
    return manifest


def begin(folder: Path, step: int) -> Path:
    """Removes what killed saves left behind and returns a new, empty folder for the files of `step`."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in sorted(folder.iterdir()):
        if leftover.suffix in (_SAVING, _DELETING):
            _remove(leftover)
        elif leftover.suffix == _REPLACED:
            original = leftover.with_suffix("")
            if original.exists():
                _delete(leftover)
            else:
                os.rename(leftover, original)
    saving = folder / (_name(step) + _SAVING)
    saving.mkdir()
    return saving


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Writes one durable safetensors file. Returns its entry for the manifest. Raises OSError naming the file."""
    try:
        save_file(dict(tensors), path)
        _sync(path)
        return {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    except (OSError, SafetensorError) as error:
        raise OSError(f"{path}: {error}") from error


def commit(saving: Path, manifest: Mapping[str, Any], keep: int) -> Path:
    """Makes a folder whose files are all durable the newest checkpoint. Returns its final path.

    Afterwards only the `keep` newest checkpoints are left.
    """
    folder, final = saving.parent, saving.with_suffix("")
    sequence = 1 + max((_sequence(path) for path in _newest_first(folder)), default=0)
    _write_text(saving / MANIFEST, _encode({**manifest, "format": FORMAT, "sequence": sequence}))
    _sync(saving)
    replaced = final.with_name(final.name + _REPLACED)
    if final.exists():
        os.rename(final, replaced)
    os.rename(saving, final)
    _sync(folder)
    _write_text(folder / (LATEST + _SAVING), final.name + "\n")
    os.replace(folder / (LATEST + _SAVING), folder / LATEST)
    _sync(folder)
    _retire(final, replaced, keep)
    return final


def abandon(saving: Path) -> None:
    """Removes the files of a failed save, as far as that is possible."""
    shutil.rmtree(saving, ignore_errors=True)


def _retire(newest: Path, replaced: Path, keep: int) -> None:
    older = [path for path in _newest_first(newest.parent) if path not in (newest, replaced)]
    for path in older[keep - 1 :] + [replaced] * replaced.exists():
        try:
            _delete(path)
        except OSError as error:  # the new checkpoint is safe: no reason to stop a run
            _LOG.warning("could not delete the old checkpoint %s: %s", path, error)


def _newest_first(folder: Path) -> list[Path]:
    """All checkpoints, by the order in which they were saved; those with an unreadable manifest come by their step."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    by_step = sorted(found, key=lambda path: path.name)
    order, sequence = {}, 0
    for path in by_step:
        sequence = _sequence(path) or sequence
        order[path] = sequence
    return sorted(by_step, key=lambda path: (order[path], path.name), reverse=True)


def _sequence(path: Path) -> int:
    """1 for the first checkpoint of a run, and so on; 0: its manifest cannot be read."""
    try:
        return int(read_manifest(path)["sequence"])
    except UserError:
        return 0


def _verify_file(file: Path, entry: Mapping[str, Any]) -> None:
    try:
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise UserError(f"{file}: damaged ({size} bytes instead of {entry['bytes']})")
        if _sha256(file) != entry["sha256"]:
            raise UserError(f"{file}: damaged (its SHA-256 is not that of the manifest)")
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error


def _encode(manifest: Mapping[str, Any]) -> str:
    """The one text of a manifest, checksum included: whatever differs from it by a single byte is damaged."""
    plain = json.loads(json.dumps(manifest))  # keys become strings before they are sorted, as they will be when read
    checksum = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    return json.dumps({**plain, "checksum": checksum}, sort_keys=True, indent=1) + "\n"


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Makes a file's content, or a folder's list of names, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete(path: Path) -> None:
    """Renames first: a folder half deleted must not look like a checkpoint."""
    doomed = path.with_name(path.name + _DELETING)
    os.rename(path, doomed)
    _sync(path.parent)
    _remove(doomed)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
