"""A dense Llama checkpoint of Hugging Face's as the start of a run: what `train.init_from` takes, and a config."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from data_pipeline.errors import UserError
from data_pipeline.files import building, refuse_existing
from data_pipeline.folder import is_url
from data_pipeline.index import Manifest
from data_pipeline.tokenizer import MODEL_NAME, Tokenizer
from fastslow_scale.config import Config
from fastslow_scale.config_file import config_of
from fastslow_scale.inference.llama_names import EXPORTED_MODEL_NAME, Tensors, fuse, sources
from fastslow_scale.model.model import FastSlowModel, build_model
from fastslow_scale.parallel.mesh import single_process_mesh
from fastslow_scale.train.weights_only import save_weights

# Keys of config.json whose other values are features that the fast path lacks. None: absent or null.
NEEDED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "hidden_act": (None, "silu"),
    "rope_scaling": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1.0),
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# What may be chosen freely; all else of the section follows from the weights.
FREE = ("variant", "vocab_multiple", "initializer_range")
LONGEST_DEFAULT = 1024


@dataclass(frozen=True)
class Imported:
    """What was written: `config` is that of the run to start, `path` its file; `parameters` counts padding too."""

    config: Config
    path: Path
    parameters: int
    notes: list[str]


def import_llama(source: Path, output: Path, overrides: Sequence[str] = ()) -> Imported:
    """Make `output` a folder that `train.init_from` accepts, with a config.yaml that starts a coupled run from it.

    The checkpoint is a dense model of step 0. A run of another variant adds its exchanges, whose gates are zero: it
    begins as the same function. The tokenizer is that of `data.path` where an override names it, else the one in
    `source`.

    Args:
        overrides: section.key=value, for config.yaml.

    Raises:
        UserError: `source` is no Llama that the fast path can be, or holds no safetensors; there is no tokenizer that
            fits it; `output` is not empty or cannot be written.
    """
    refuse_existing(output)
    described = _read_json(source / "config.json")
    for override in overrides:
        section, _, key = override.partition("=")[0].partition(".")
        if section == "model" and key not in FREE:
            raise UserError(f"model.{key} follows from the weights of {source} and cannot be given")
    tree = {"model": llama_section(described, source), "train": _run(described, output)}
    config = config_of(tree, source / "config.json", overrides)
    tokenizer, notes = _tokenizer(source, config)
    if not any(override.startswith("train.seq_length=") for override in overrides):
        data = _local_data(config)
        config.train.seq_length = Manifest.load(data).seq_length if data else config.train.seq_length

    dense = Config.model_validate(
        config.model_dump(mode="json")
        | {"model": config.model.model_dump() | {"variant": "dense"}}
        | {"parallel": {"zero_stage": config.parallel.zero_stage}}
        | {"train": config.train.model_dump(mode="json") | {"init_from": None}}
    )
    with torch.device("meta"):
        model = build_model(dense, single_process_mesh(), torch.float32)
    weights = read_llama(source, model, dense)
    with building(output) as folder:
        (folder / MODEL_NAME).write_bytes(tokenizer.model)
        (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
        state = {"step": 0, "config": dense.model_dump(mode="json"), "tokenizer_sha256": tokenizer.sha256}
        save_weights(folder / "checkpoints", model, weights, state)
    parameters = sum(weight.numel() for weight in weights.values())
    return Imported(config, output / "config.yaml", parameters, notes)


def llama_section(described: dict[str, Any], source: Path) -> dict[str, Any]:
    """The `model` section of a config for what config.json describes.

    Raises:
        UserError: it is another architecture, or has features that the fast path lacks; names the key.
    """
    file, kind = source / "config.json", described.get("model_type")
    if kind not in ("llama", "mistral"):
        raise UserError(f"{file}: model_type is {kind}; only llama and mistral can be imported")
    for key, values in NEEDED.items():
        if described.get(key) not in values:
            raise UserError(f"{file}: {key} is {json.dumps(described[key])}, which the fast path does not have")
    rope = described.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise UserError(f"{file}: rope_type is {rope['rope_type']}, which the fast path does not have")
    for key in SIZES:
        if not isinstance(described.get(key), int):
            raise UserError(f"{file}: {key} must be a whole number (got {described.get(key)})")
    heads = described["num_attention_heads"]
    head_dim = described.get("head_dim") or described["hidden_size"] // heads
    if head_dim * heads != described["hidden_size"]:
        raise UserError(f"{file}: head_dim is {head_dim}, which is not hidden_size / num_attention_heads")
    return {
        "variant": "coupled",
        **{key: described[key] for key in SIZES},
        "num_key_value_heads": described.get("num_key_value_heads") or (heads if kind == "llama" else 8),
        "rope_theta": float(rope.get("rope_theta") or described.get("rope_theta") or 10000.0),
        "rms_norm_eps": described.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": described.get("tie_word_embeddings", False),
        "attention_window": described.get("sliding_window", 4096) if kind == "mistral" else None,
        "initializer_range": described.get("initializer_range", 0.02),
    }


def read_llama(source: Path, model: FastSlowModel, config: Config) -> Tensors:
    """Every parameter of `model` in fp32, from the safetensors of a Hugging Face folder.

    Raises:
        UserError: no safetensors, or a file that cannot be read; a weight is missing, unknown, or of another shape.
    """
    there = _open_all(source)
    weights: Tensors = {}
    for name, parameter in model.named_parameters():
        parts: Tensors = {}
        for key in sources(name):
            if key not in there:
                raise UserError(f"{source} lacks {key}")
            parts[key] = there.pop(key).get_tensor(key).float()
        try:
            weight = fuse(name, parts, config)
        except RuntimeError:
            weight = torch.empty(0)
        if weight.shape != parameter.shape:
            shapes = ", ".join(f"{key} is {tuple(part.shape)}" for key, part in parts.items())
            raise UserError(f"{source}: {shapes}, which does not fit its config.json")
        weights[name] = weight
    if config.model.tie_word_embeddings:
        there.pop("lm_head.weight", None)
    for key in sorted(there):
        if not key.endswith("rotary_emb.inv_freq"):
            raise UserError(f"{source} has {key}, which the fast path does not have")
    return weights


def _open_all(source: Path) -> dict[str, Any]:
    """Weight -> the open file that holds it."""
    index = source / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = {str(name) for name in _read_json(index).get("weight_map", {}).values()}
    there: dict[str, Any] = {}
    for name in sorted(names):
        file = source / Path(name).name
        if not file.is_file():
            raise UserError(f"{file} does not exist; weights are read from safetensors only")
        try:
            opened = safe_open(file, "pt")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: {error}") from None
        there |= dict.fromkeys(opened.keys(), opened)
    return there


def _tokenizer(source: Path, config: Config) -> tuple[Tokenizer, list[str]]:
    """The tokenizer of the run's data, or of the checkpoint, and what to say of it."""
    own, data, notes = source / MODEL_NAME, _local_data(config), []
    if (source / EXPORTED_MODEL_NAME).is_file():
        own = source / EXPORTED_MODEL_NAME
    if data is None and not own.is_file():
        raise UserError(f"{own} does not exist: give data.path=DIR, the folder of the data to train on")
    tokenizer = Tokenizer.load(data or own)
    if tokenizer.vocab_size != config.model.vocab_size:
        raise UserError(
            f"{(data or source) / MODEL_NAME} has {tokenizer.vocab_size} pieces, "
            f"but {source} has a vocabulary of {config.model.vocab_size}"
        )
    if data is not None and (not own.is_file() or own.read_bytes() != tokenizer.model):
        notes.append(f"the tokenizer of {data} is not known to be that of {source}: ids must mean the same in both")
    return tokenizer, notes


def _local_data(config: Config) -> Path | None:
    return Path(config.data.path) if config.data.path and not is_url(config.data.path) else None


def _run(described: dict[str, Any], output: Path) -> dict[str, Any]:
    """What a config must say of the run itself; the user changes it at will."""
    return {
        "init_from": str(output),
        "run_dir": str(output.with_name(output.name + "_run")),
        "seq_length": min(described.get("max_position_embeddings", math.inf), LONGEST_DEFAULT),
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "max_steps": 1000,
    }


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file} does not exist") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} does not hold an object")
    return content
