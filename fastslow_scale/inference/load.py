"""A trained model on one process, whatever layout trained it: from a run folder, one checkpoint or an export."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import ValidationError

from data_pipeline.errors import UserError
from data_pipeline.folder import is_url
from data_pipeline.index import Manifest
from data_pipeline.tokenizer import MODEL_NAME, Tokenizer
from fastslow_scale.config import Config
from fastslow_scale.inference.load_export import is_export, load_export
from fastslow_scale.inference.loaded import Loaded
from fastslow_scale.model.model import FastSlowModel, build_model
from fastslow_scale.parallel.mesh import single_process_mesh
from fastslow_scale.train.checkpoint_files import find_checkpoint, locate
from fastslow_scale.train.checkpoint_reader import CheckpointReader


def load_model(run_or_checkpoint: Path | str) -> Loaded:
    """Load the newest sound checkpoint of a run folder, the checkpoint in a folder step_XXXXXXXX, or an export.

    Raises:
        UserError: no such run, no checkpoint yet, a damaged one, or no tokenizer that fits it.
    """
    if is_export(Path(run_or_checkpoint)):
        return load_export(Path(run_or_checkpoint))
    checkpoint, notes = choose_checkpoint(Path(run_or_checkpoint))
    reader = CheckpointReader(checkpoint)
    config = read_config(reader)
    tokenizer = find_tokenizer(reader, config)
    mesh = single_process_mesh()
    model = build_model(config, mesh, torch.float32)
    read_weights(model, reader)
    return Loaded(model.to(mesh.device).eval(), tokenizer, config, checkpoint, notes)


def choose_checkpoint(path: Path) -> tuple[Path, list[str]]:
    """The checkpoint that a run folder or a checkpoint's folder stands for, and what was passed over on the way."""
    found = find_checkpoint(*locate(path))
    if found.path is None:
        raise UserError(f"run {path} has no checkpoint yet")
    return found.path, [f"passed over checkpoint {passed}: {reason}" for passed, reason in found.passed_over]


def read_config(reader: CheckpointReader) -> Config:
    """The config that the checkpoint was trained with, on one process; the ZeRO stage stays, other keys ask for it."""
    try:
        saved = reader.state["config"]
        return Config.model_validate({**saved, "parallel": {"zero_stage": saved["parallel"]["zero_stage"]}})
    except (KeyError, TypeError, ValidationError):
        raise UserError(f"{reader.path} has no config that this version understands") from None


def find_tokenizer(reader: CheckpointReader, config: Config) -> Tokenizer:
    """The tokenizer that the run keeps, or else the one in the data folder that it was trained on."""
    kept = reader.path.parent.parent / MODEL_NAME
    data = Path(config.data.path) if config.data.path and not is_url(config.data.path) else None
    if kept.is_file():
        tokenizer = Tokenizer.load(kept)
        source = kept
    elif data is not None and (data / MODEL_NAME).is_file():
        tokenizer = Tokenizer.load(data / MODEL_NAME)
        source = data / MODEL_NAME
        manifest = Manifest.load(data)
        if manifest.fingerprint != reader.state.get("data_fingerprint"):
            raise UserError(f"{reader.path} was trained on other data than {data}, whose tokenizer may not fit it")
        if manifest.tokenizer_sha256 != tokenizer.sha256:
            raise UserError(f"{source} is damaged: its sha256 differs from the one in the manifest of {data}")
    else:
        raise UserError(f"{kept} is missing, and data.path = {config.data.path} has no {MODEL_NAME} either")
    if tokenizer.vocab_size != config.model.vocab_size:
        raise UserError(
            f"{source} has {tokenizer.vocab_size} pieces "
            f"but {reader.path} has model.vocab_size {config.model.vocab_size}"
        )
    return tokenizer


@torch.no_grad()
def read_weights(model: FastSlowModel, reader: CheckpointReader) -> None:
    """Give every parameter its saved value."""
    require_described(model, reader)
    for name, parameter in model.named_parameters():
        parameter.copy_(reader.full(name))


def require_described(model: FastSlowModel, reader: CheckpointReader) -> None:
    """Raises UserError unless the checkpoint holds exactly the parameters of the model that its config describes."""
    parameters = dict(model.named_parameters())
    if set(parameters) != set(reader.names()):
        raise UserError(f"{reader.path} holds other parameters than its config describes")
    for name, parameter in parameters.items():
        if reader.shape(name) != tuple(parameter.shape):
            raise UserError(f"{reader.path}: {name} is {reader.shape(name)}, its config says {tuple(parameter.shape)}")
