"""A trained model as a Hugging Face folder: a dense one as a plain Llama, the others with their own model code."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from data_pipeline.errors import UserError
from data_pipeline.files import building, fsync_path, refuse_existing
from data_pipeline.tokenizer import Tokenizer
from fastslow_scale.config import Config
from fastslow_scale.inference.llama_names import EXPORTED_MODEL_NAME, Tensors, split
from fastslow_scale.inference.load import choose_checkpoint, find_tokenizer, read_config, require_described
from fastslow_scale.inference.model_card import model_card
from fastslow_scale.model.model import build_model
from fastslow_scale.parallel.mesh import single_process_mesh
from fastslow_scale.train.checkpoint_reader import CheckpointReader

CODE = Path(__file__).parent / "hf"
MODELING, TOKENIZATION = "modeling_fastslow", "tokenization_fastslow"
SLOW_KEYS = (
    "pool_size",
    "exchange_after",
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "phi_intermediate_size",
)
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "fastslow": "FastSlowForCausalLM"}


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        checkpoint: the folder it came from.
        architecture: the class that loads it.
        parameters: how many numbers the weights hold, padding of the vocabulary removed.
        notes: what a user should know, such as a damaged checkpoint that was passed over.
    """

    checkpoint: Path
    architecture: str
    parameters: int
    notes: list[str]


def export(run_or_checkpoint: Path | str, output: Path) -> Exported:
    """Write the newest sound checkpoint of a run, or the checkpoint in a folder step_XXXXXXXX, to `output`.

    Raises:
        UserError: no such run, no sound checkpoint, no tokenizer that fits it; `output` is not empty or cannot be
            written; a model that Hugging Face's code cannot run.
    """
    refuse_existing(output)
    checkpoint, notes = choose_checkpoint(Path(run_or_checkpoint))
    reader = CheckpointReader(checkpoint)
    config = read_config(reader)
    kind = _kind(config, checkpoint)
    tokenizer = find_tokenizer(reader, config)
    tensors = read_tensors(reader, config)
    architecture, parameters = ARCHITECTURES[kind], sum(tensor.numel() for tensor in tensors.values())
    with building(output) as folder:
        _write_json(folder / "config.json", hf_config(config, kind, tokenizer))
        _write_json(folder / "generation_config.json", _special_ids(tokenizer))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        if kind == "fastslow":
            shutil.copyfile(CODE / f"{MODELING}.py", folder / f"{MODELING}.py")
        _write_tokenizer(folder, tokenizer, config)
        card = model_card(reader, config, architecture, parameters)
        (folder / "README.md").write_text(card, encoding="utf-8")
        for file in folder.iterdir():
            fsync_path(file)
    return Exported(checkpoint, architecture, parameters, notes)


def read_tensors(reader: CheckpointReader, config: Config) -> Tensors:
    """All weights in fp32, under Llama's names.

    Raises:
        UserError: the checkpoint holds other parameters than its config describes.
    """
    with torch.device("meta"):
        require_described(build_model(config, single_process_mesh(), torch.float32), reader)
    tensors: Tensors = {}
    for name in reader.names():
        tensors |= split(name, reader.full(name), config)
    return tensors


def hf_config(config: Config, kind: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of config.json."""
    model = config.model
    tree: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.key_value_heads,
        "hidden_act": "silu",
        "max_position_embeddings": config.train.seq_length,
        "initializer_range": model.initializer_range,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_word_embeddings,
        "torch_dtype": "float32",
        "reset_at_document": config.data.reset_at_document,  # for `fastslow eval`; transformers passes it over
        **_special_ids(tokenizer),
    }
    if kind == "llama":
        tree |= {"attention_bias": False, "mlp_bias": False}
    elif kind == "mistral":
        tree["sliding_window"] = model.attention_window
    else:
        tree["auto_map"] = {
            "AutoConfig": f"{MODELING}.FastSlowConfig",
            "AutoModelForCausalLM": f"{MODELING}.{ARCHITECTURES[kind]}",
        }
        tree["attention_window"] = model.attention_window
        tree["slow"] = {key: getattr(config.slow, key) for key in SLOW_KEYS}
    return tree


def _kind(config: Config, checkpoint: Path) -> str:
    """Which code is to run the model. Llama's has no window; Mistral's is Llama's with one."""
    variant, window = config.model.variant, config.model.attention_window
    if variant == "shuffled":
        raise UserError(
            f"{checkpoint} is of variant shuffled, which hears of other sequences of its batch: it is not exported"
        )
    if variant != "dense":
        return "fastslow"
    if window is None:
        return "llama"
    if window == 1:
        raise UserError(
            f"{checkpoint} has model.attention_window 1: Hugging Face's Mistral, which a dense model with a window "
            "becomes, cannot keep a cache for it"
        )
    return "mistral"


def _special_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """A document begins after the end of the one before it: there is no other mark for a beginning."""
    eos = tokenizer.eos_id
    return {"bos_token_id": eos, "eos_token_id": eos, "pad_token_id": tokenizer.pad_id}


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, config: Config) -> None:
    (folder / EXPORTED_MODEL_NAME).write_bytes(tokenizer.model)
    shutil.copyfile(CODE / f"{TOKENIZATION}.py", folder / f"{TOKENIZATION}.py")
    settings = {
        "tokenizer_class": "FastSlowTokenizer",
        "auto_map": {"AutoTokenizer": [f"{TOKENIZATION}.FastSlowTokenizer", None]},
        "model_max_length": config.train.seq_length,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
