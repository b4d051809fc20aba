"""An exported folder as a model of this project again: `fastslow eval` and `generate` take one in place of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from data_pipeline.errors import UserError
from data_pipeline.tokenizer import Tokenizer
from fastslow_scale.config import Config
from fastslow_scale.inference.llama_names import EXPORTED_MODEL_NAME, fuse
from fastslow_scale.inference.loaded import Loaded
from fastslow_scale.model.model import build_model
from fastslow_scale.parallel.mesh import single_process_mesh

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rope_theta",
    "rms_norm_eps",
    "tie_word_embeddings",
)


def is_export(path: Path) -> bool:
    """Whether `fastslow export` wrote this folder."""
    return (path / "config.json").is_file() and (path / EXPORTED_MODEL_NAME).is_file()


def load_export(folder: Path) -> Loaded:
    """The model, its tokenizer, and a config with what the folder knows: shapes and the trained context.

    Raises:
        UserError: a file is missing or damaged, or holds other weights than config.json describes.
    """
    config = config_of_export(folder)
    tokenizer = Tokenizer.load(folder / EXPORTED_MODEL_NAME)
    mesh = single_process_mesh()
    model = build_model(config, mesh, torch.float32)
    try:
        tensors = load_file(folder / "model.safetensors")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                whole = fuse(name, tensors, config)
                if whole.shape != parameter.shape:
                    raise UserError(
                        f"{folder}: {name} is {tuple(whole.shape)}, config.json says {tuple(parameter.shape)}"
                    )
                parameter.copy_(whole)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / 'model.safetensors'} cannot be read: {error}") from None
    except KeyError as error:
        raise UserError(f"{folder / 'model.safetensors'} lacks {error}, which config.json describes") from None
    return Loaded(model.to(mesh.device).eval(), tokenizer, config, folder, [])


def config_of_export(folder: Path) -> Config:
    """Raises UserError: config.json is damaged, or lacks a key."""
    try:
        described: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model = {key: described[key] for key in SIZES} | {"variant": "coupled" if "slow" in described else "dense"}
        model["attention_window"] = described.get("attention_window", described.get("sliding_window"))
        train = {"seq_length": described["max_position_embeddings"], "max_steps": 1}
        train |= {"micro_batch_size": 1, "global_batch_size": 1}
        data = {"reset_at_document": described.get("reset_at_document", False)}
        slow = described.get("slow", {})
        return Config.model_validate({"model": model, "slow": slow, "data": data, "train": train})
    except KeyError as error:
        raise UserError(f"{folder / 'config.json'} lacks the key {error}") from None
    except (ValueError, TypeError, AttributeError, ValidationError) as error:
        raise UserError(f"{folder / 'config.json'} is damaged: {str(error).splitlines()[0]}") from None
