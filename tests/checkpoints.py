"""Run folders of models that no run trained, cut as a run on several tensor-parallel ranks would cut them."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import torch

from data_pipeline.tokenizer import MODEL_NAME, Tokenizer, train_tokenizer
from fastslow_scale.config import Config
from fastslow_scale.model.model import FastSlowModel, build_model
from fastslow_scale.parallel.mesh import single_process_mesh
from fastslow_scale.parallel.sharing import sharded_dim
from fastslow_scale.train import checkpoint_files as files
from tests.configs import small_config

VOCABULARY, CONTEXT = 360, 256
WORDS = "grief hill lamp moss über naïve 中文 river stone \U0001f600 thorn under vale".split()


@functools.cache
def tokenizer_of(vocab_size: int = VOCABULARY) -> Tokenizer:
    rng = random.Random(0)
    texts = [f"{n} " + " ".join(rng.choices(WORDS, k=30)) + "\n" for n in range(200)]
    return train_tokenizer(texts, vocab_size)[0]


def config_of(**changes: dict[str, Any]) -> Config:
    sections = {name: dict(section) for name, section in changes.items()}
    model = {"vocab_size": VOCABULARY, "vocab_multiple": 64, "rope_theta": 5000.0} | sections.pop("model", {})
    train = {"seq_length": CONTEXT} | sections.pop("train", {})
    return small_config(model=model, train=train, **sections)


def some_ids(length: int, batch: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def random_model(config: Config, seed: int = 1, scale: float = 0.8) -> FastSlowModel:
    """Weights large enough that every part shows in the logits, norms that differ, gates that are open.

    scale: of a matrix that keeps the size of its input at 1; a greedy text does not repeat itself from 1.5 on.
    """
    model = build_model(config, single_process_mesh(), torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if name.endswith("gate"):
                p.copy_(noise * (config.model.variant != "frozen"))
            elif p.ndim == 1:
                p.copy_(1 + noise / 4)
            else:
                p.copy_(scale * noise / p.shape[1] ** 0.5)
    return model.eval()


def save_run(folder: Path, model: FastSlowModel, tokenizer: Tokenizer, step: int = 3, tp_size: int = 1) -> Path:
    """Make `folder` a run folder whose checkpoint holds the model. Returns the checkpoint's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(model.config.to_yaml())
    (folder / MODEL_NAME).write_bytes(tokenizer.model)
    parameters, ranks = {}, [{} for _ in range(tp_size)]
    for index, (name, p) in enumerate(model.named_parameters()):
        dim = sharded_dim(p)
        described = {"index": index, "shape": list(p.shape), "tp_dim": dim, "trained": True, "adam_step": None}
        parameters[name] = described
        shards = [p.detach()] if dim is None else p.detach().chunk(tp_size, dim)
        for rank, shard in enumerate(shards):
            flat = shard.flatten()
            half = len(flat) // 2
            ranks[rank] |= {f"{name}|fp32|0": flat[:half], f"{name}|fp32|{half}": flat[half:]}
    saving = files.begin(folder / "checkpoints", step)
    entries = {}
    for rank, tensors in enumerate(ranks):
        file = f"tp{rank}_dp0.safetensors"
        entries[file] = files.write_tensors(saving / file, tensors) | {"tp_rank": rank, "dp_rank": 0}
    manifest = {
        "step": step,
        "layout": {"tp_size": tp_size, "dp_size": 1, "zero_stage": 0},
        "parameters": parameters,
        "state": {"config": model.config.model_dump(mode="json"), "tokenizer_sha256": tokenizer.sha256},
        "files": entries,
    }
    return files.commit(saving, manifest, keep=5)
