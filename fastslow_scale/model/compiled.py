"""The parts between matrix products as compiled kernels (`train.compile`).

These are three pure functions of this rank's own tensors, without collectives or attention: so each is one graph, the
same for every layer, layout and ZeRO stage.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from data_pipeline.errors import UserError
from fastslow_scale.model.attention import Attention, queries_keys_values
from fastslow_scale.model.layers import MLP, swiglu
from fastslow_scale.model.norm import RMSNorm, rms_norm


def compile_inner_parts(model: nn.Module) -> None:
    """From now on training runs them compiled; what runs without gradients stays as it was.

    A kernel holds for one shape, that of the training's micro-batches, and is the same whatever ran before: a resumed
    run computes what an uninterrupted one does. The first step waits for the compiler.

    Raises:
        UserError: there is no C++ compiler, or torch is too old to compile alike on all GPUs.
    """
    if not shutil.which("g++"):
        raise UserError("train.compile needs the C++ compiler g++, which was not found")
    if torch.cuda.is_available():
        _let_all_ranks_choose_the_same_kernels()
    prepare, activate = _in_training(queries_keys_values), _in_training(swiglu)
    normalize = _in_training(rms_norm)
    for module in model.modules():
        if isinstance(module, Attention):
            module.prepare = prepare
        elif isinstance(module, MLP):
            module.activate = activate
        elif isinstance(module, RMSNorm):
            module.normalize = normalize


def _let_all_ranks_choose_the_same_kernels() -> None:
    """Otherwise each measures several on its GPU and takes the fastest: tensor-parallel peers could sum in different
    orders, and so could a resumed run."""
    import torch._inductor.config as inductor

    if not hasattr(inductor, "deterministic"):
        raise UserError(f"train.compile on GPUs needs a newer torch than {torch.__version__}")
    inductor.deterministic = True


def _in_training(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(function, dynamic=False, fullgraph=True)

    def call(*args: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else function)(*args)

    return call
