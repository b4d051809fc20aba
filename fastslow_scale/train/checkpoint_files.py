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
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data_pipeline.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
LATEST = "latest"

_SAVING, _DELETING, _REPLACED = ".saving", ".deleting", ".replaced"
_NAME = re.compile(rf"step_(\d{{8,}})({re.escape(_REPLACED)})?")
_CHUNK = 4 << 20
_DTYPES = {torch.float32: "F32", torch.uint8: "U8", torch.int64: "I64", torch.float64: "F64"}  # safetensors' words
_LOG = logging.getLogger(__name__)


class Found(NamedTuple):
    """The checkpoint to resume from (None: a fresh start) and the newer ones passed over, each with the reason."""

    path: Path | None
    passed_over: list[tuple[Path, str]]


def find_checkpoint(folder: Path, resume: str = "auto") -> Found:
    """The newest sound checkpoint in `folder` (`auto`), none (`never`), or the one that `resume` names.

    Newest is the one saved last, also after a return to an earlier step. Every byte is read, so one rank should ask for
    all, or all should share the work (`checkpoint.find_together`).

    Raises:
        UserError: the named checkpoint is damaged, or there are checkpoints and none is sound. Names the damaged file.
    """
    return first_sound(folder, resume, candidates(folder, resume), verify)


def candidates(folder: Path, resume: str) -> list[Path]:
    """What `resume` may mean, the best first, unverified. Raises UserError: it names no folder."""
    if resume == "never":
        return []
    if resume == "auto":
        return _newest_first(folder)
    if not Path(resume).is_dir():
        raise UserError(f"--resume {resume}: no such checkpoint; give auto, never, or a checkpoint's folder")
    return [Path(resume)]


def first_sound(folder: Path, resume: str, paths: Sequence[Path], check: Callable[[Path], None]) -> Found:
    """The first of `paths` for which `check` does not raise UserError. See `find_checkpoint`."""
    passed_over: list[tuple[Path, str]] = []
    for path in paths:
        try:
            check(path)
        except UserError as damage:
            if resume != "auto":
                raise
            passed_over.append((path, str(damage)))
        else:
            return Found(path, passed_over)
    if passed_over:
        raise UserError(f"no checkpoint in {folder} is sound: " + "; ".join(reason for _, reason in passed_over))
    return Found(None, [])


def locate(path: Path) -> tuple[Path, str]:
    """Where to look for the checkpoint that `path` stands for, a run folder or a checkpoint's: (`folder`, `resume`).

    Raises:
        UserError: it is neither.
    """
    if not path.is_dir():
        raise UserError(f"run {path} does not exist" if not path.exists() else f"{path} is a file, not a run folder")
    if _NAME.fullmatch(path.name):
        return path.parent, str(path)
    if not (path / "checkpoints").is_dir() and not (path / "config.yaml").is_file():
        raise UserError(f"{path} is neither a run folder nor a checkpoint")
    return path / "checkpoints", "auto"


def verify(path: Path, part: int = 0, parts: int = 1) -> None:
    """Raises UserError, naming the file, unless every file of the checkpoint is there as it was written.

    The bytes are read by `parts` ranks together, each of which passes its own `part`. At the layout that wrote the
    checkpoint that is the file which the rank will load from, so that the second reading comes from memory.
    """
    manifest = read_manifest(path)
    tp_size, entries = manifest["layout"]["tp_size"], manifest["files"]
    own = [name for name, at in sorted(entries.items()) if (at["dp_rank"] * tp_size + at["tp_rank"]) % parts == part]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the interpreter lock
        for _ in pool.map(lambda name: _verify_file(path / name, entries[name]), own):
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


def require_space(folder: Path, needed: int) -> None:
    """Raises UserError unless the file system of `folder` can take `needed` more bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(f"{folder} needs {needed / 1e6:,.1f} MB, but only {free / 1e6:,.1f} MB are free there")


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Writes one durable safetensors file. Returns its entry for the manifest. Raises OSError naming the file.

    Every byte is hashed on its way from memory, and never read back: what the disk made of it is then found by
    `verify`. Neither hashing nor writing holds the interpreter lock, so a training loop goes on beside it.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data
    digest = hashlib.sha256()
    try:
        with path.open("wb", buffering=0) as file:
            write_chunk(file, digest, len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
                for start in range(0, len(content), _CHUNK):
                    write_chunk(file, digest, content[start : start + _CHUNK])
            os.fsync(file.fileno())
        return {"bytes": 8 + len(text) + end, "sha256": digest.hexdigest()}
    except OSError as error:
        raise OSError(f"{path}: {error.strerror}") from error


def write_chunk(file: io.FileIO, digest: Any, content: bytes | memoryview) -> None:
    """Every byte of a tensor file passes here, at most a few megabytes at a time."""
    digest.update(content)
    written = 0
    while written < len(content):  # a nearly full disk takes a part first, and says so at the next attempt
        written += file.write(content[written:])


def commit(saving: Path, manifest: Mapping[str, Any], keep: int, keep_every: int = 0) -> Path:
    """Makes a folder whose files are all durable the newest checkpoint. Returns its final path.

    Afterwards the `keep` newest sound checkpoints are left, and those whose step is a multiple of `keep_every`.
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
    _retire(final, replaced, keep, keep_every)
    return final


def abandon(saving: Path) -> None:
    """Removes the files of a failed save, as far as that is possible."""
    shutil.rmtree(saving, ignore_errors=True)


def _retire(newest: Path, replaced: Path, keep: int, keep_every: int) -> None:
    """Deletes what is too old. A checkpoint that lost a file does not count among the `keep` that stay."""
    if not _is_whole(newest):
        _LOG.warning("the new checkpoint %s is not as it was written: no older one is deleted", newest)
        return
    doomed = [replaced] * replaced.exists()
    kept = 1
    for path in _newest_first(newest.parent):
        if path in (newest, replaced):
            continue
        if kept >= keep and not (keep_every and _step(path) % keep_every == 0):
            doomed.append(path)
        kept += _is_whole(path)
    for path in doomed:
        try:
            _delete(path)
        except OSError as error:  # the new checkpoint is safe: no reason to stop a run
            _LOG.warning("could not delete the old checkpoint %s: %s", path, error)


def _is_whole(path: Path) -> bool:
    """Whether every file is there in its full length: what can be told without reading them."""
    try:
        return all((path / name).stat().st_size == at["bytes"] for name, at in read_manifest(path)["files"].items())
    except (UserError, OSError):
        return False


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


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match, "the caller lists checkpoints only"
    return int(match[1])


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
