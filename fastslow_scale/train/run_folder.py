"""A run's folder: config.yaml, command, versions, tokenizer.model beside what the monitor and the checkpoints write."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from data_pipeline.errors import UserError
from data_pipeline.files import write_durably
from data_pipeline.mixture import Data
from data_pipeline.tokenizer import MODEL_NAME, Tokenizer
from fastslow_scale.config import Config, ModelConfig, SlowConfig
from fastslow_scale.config_file import load_config
from fastslow_scale.versions import versions

# What may change between two starts of one run: where and how it computes, not what.
MAY_CHANGE = {
    "parallel": None,
    "checkpoint": None,
    "monitor": None,
    "validation": None,
    "study": None,
    "data": {"num_workers", "on_error", "cache_dir", "cache_gb"},
    "train": {
        "run_dir",
        "micro_batch_size",
        "deterministic",
        "recompute",
        "compile",
        "sanity_every",
        "timeout_seconds",
    },
}

# What may not even change where a run of another folder goes on from a checkpoint (`--resume PATH`).
RESUME_KEEPS = {
    "model": [*ModelConfig.model_fields],
    "slow": [key for key in SlowConfig.model_fields if key not in ("lr_multiplier", "gate_lr_multiplier", "eps")],
    "train": ["seq_length", "global_batch_size"],
}


def open_run_folder(config: Config, command: str, data: Data) -> Path:
    """Make the folder, or take up the one that an earlier start of the same run left.

    Raises:
        UserError: the folder cannot be written, or the data's tokenizer is missing or another one.
    """
    folder = config.train.run_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A folder whose config.yaml is cut short could not be gone on with, whatever checkpoints it holds.
        write_durably(folder / "config.yaml", config.to_yaml().encode())
        write_durably(folder / "command", f"{command}\n".encode())
        write_durably(folder / "versions", "".join(f"{line}\n" for line in versions()).encode())
    except OSError as error:
        raise UserError(f"train.run_dir {folder} cannot be written: {error.strerror}") from None
    keep_tokenizer(folder, data)
    return folder


def keep_tokenizer(folder: Path, data: Data) -> None:
    """Copy the data's tokenizer into the run folder: the model is of no use without it, and the data may go.

    Raises:
        UserError: it is missing, is not the one that encoded the data, or cannot be written.
    """
    tokenizer = Tokenizer.load(data.tokenizer_path)
    if tokenizer.sha256 != data.tokenizer_sha256:
        raise UserError(f"{data.tokenizer_path} is not the tokenizer that encoded {data.location}")
    try:
        write_durably(folder / MODEL_NAME, tokenizer.model)
    except OSError as error:
        raise UserError(f"{folder / MODEL_NAME} cannot be written: {error.strerror}") from None


def refuse_other_run(config: Config) -> None:
    """Raise `UserError` where the run folder cannot be, or holds a run of another config or without one."""
    folder = config.train.run_dir
    saved = folder / "config.yaml"
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"train.run_dir {folder} cannot be written: {there} is not a folder one can write to")
    if saved.exists():
        refuse_other_config(saved, load_config(saved), config)
    elif (folder / "checkpoints").exists() or (folder / "metrics.jsonl").exists():
        raise UserError(f"{folder} holds a run without its config.yaml; choose another train.run_dir")


def refuse_other_config(saved: Path, old: Config, new: Config) -> None:
    """Raise `UserError` naming the first key that makes `new` another run than `old`."""
    for section, before, after in _sections(old, new):
        free = MAY_CHANGE.get(section, set())
        if free is None:
            continue
        for key in before:
            if key not in free and before[key] != after[key]:
                raise UserError(
                    f"{section}.{key} is {after[key]} but the run in {saved.parent} has {before[key]}; "
                    f"choose another train.run_dir or remove that folder"
                )


def refuse_other_function(checkpoint: Path, old: Config, new: Config) -> None:
    """Raise `UserError` where a checkpoint's weights would mean something else in `new`, or its step other samples."""
    keys = {
        section: names for section, names in RESUME_KEEPS.items() if section != "slow" or old.model.variant != "dense"
    }
    refuse_other_values(checkpoint, old.model_dump(mode="json"), new, keys)
    if old.order_seed != new.order_seed:
        raise UserError(
            f"the order of the data is that of seed {new.order_seed}, but {checkpoint} has {old.order_seed}"
        )


def refuse_other_values(
    checkpoint: Path, old: Mapping[str, Any], new: Config, keys: Mapping[str, Iterable[str]]
) -> None:
    """Raise `UserError` naming the first of these keys, by section, in which `new` is not as the checkpoint was."""
    here = new.model_dump(mode="json")
    for section, names in keys.items():
        for key in names:
            before, now = old[section][key], here[section][key]
            if before != now:
                raise UserError(f"{section}.{key} is {now}, but {checkpoint} was trained with {before}")


def _sections(old: Config, new: Config) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    return [(section, before[section], after[section]) for section in before]
