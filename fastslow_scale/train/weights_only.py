"""A checkpoint that no run wrote: weights of one process, without moments or counters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastslow_scale.parallel.sharing import sharded_dim
from fastslow_scale.train import checkpoint_files as files
from fastslow_scale.train.checkpoint_reader import WEIGHTS, piece_key


def save_weights(folder: Path, model: nn.Module, weights: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> Path:
    """Make `weights` the checkpoint of step 0 in `folder`: what `train.init_from` and the inference commands read.

    Args:
        model: of one process; says how each parameter is shared. Its own values are not used, it may be on `meta`.
        weights: the whole value of each of its parameters, in fp32.

    Raises:
        UserError: the disk is too full.
    """
    parameters = {
        name: {
            "index": index,
            "shape": list(parameter.shape),
            "tp_dim": sharded_dim(parameter),
            "trained": parameter.requires_grad,
            "adam_step": None,
        }
        for index, (name, parameter) in enumerate(model.named_parameters())
    }
    saving = files.begin(folder, 0)
    files.require_space(folder, sum(weight.nbytes for weight in weights.values()))
    tensors = {piece_key(name, WEIGHTS, 0): weights[name].flatten() for name in parameters}
    name = "tp0_dp0.safetensors"
    entry = files.write_tensors(saving / name, tensors)
    manifest = {
        "step": 0,
        "layout": {"tp_size": 1, "dp_size": 1, "zero_stage": 0},
        "parameters": parameters,
        "state": dict(state),
        "files": {name: {**entry, "tp_rank": 0, "dp_rank": 0}},
    }
    return files.commit(saving, manifest, keep=1)
