"""Where the linear maps of a layer live: cut over tensor-parallel ranks (fast path) or replicated (slow path).

A layer asks its `Linears` for `column` maps (their output features are cut over ranks) and `row` maps (their input
features are). Both return modules with y = x W^T, no bias, on [T, B, features].
"""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import torch
from torch import nn

from fastslow_scale.model.init import Init
from fastslow_scale.parallel.collectives import Group
from fastslow_scale.parallel.mesh import Mesh

with warnings.catch_warnings():
    # Megatron warns of each optional GPU package that is not installed.
    warnings.simplefilter("ignore")
    from megatron.core import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding


class Linears(Protocol):
    """Makes the linear maps of a layer and says over how many ranks they are cut."""

    tp_size: int
    norm_group: Group

    def column(self, in_features: int, out_features: int, init: Init) -> nn.Module: ...

    def row(self, in_features: int, out_features: int, init: Init) -> nn.Module: ...


class _Column(ColumnParallelLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]


class _Row(RowParallelLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]


class TensorParallelLinears:
    """Megatron's layers: column then row, one collective pair for each pair of maps (arXiv 1909.08053, 2205.05198)."""

    def __init__(self, mesh: Mesh, sequence_parallel: bool, dtype: torch.dtype):
        self.tp_size = mesh.tp_size
        self.tp_group = mesh.tp_group
        self.sequence_parallel = sequence_parallel
        self.norm_group: Group = mesh.tp_group if sequence_parallel else None
        self._config = ModelParallelConfig(
            tensor_model_parallel_size=mesh.tp_size,
            sequence_parallel=sequence_parallel,
            use_cpu_initialization=True,
            params_dtype=dtype,
        )

    def column(self, in_features: int, out_features: int, init: Init) -> nn.Module:
        return _Column(in_features, out_features, init_method=init, **self._common())

    def row(self, in_features: int, out_features: int, init: Init) -> nn.Module:
        common = self._common() | {"input_is_parallel": True, "skip_bias_add": False}
        return _Row(in_features, out_features, init_method=init, **common)

    def embedding(self, num_embeddings: int, embedding_dim: int, init: Init) -> VocabParallelEmbedding:
        """Tokens [B, T] -> [T, B, D], or this rank's [T / tp, B, D] under sequence parallelism."""
        return VocabParallelEmbedding(
            num_embeddings,
            embedding_dim,
            init_method=init,
            reduce_scatter_embeddings=self.sequence_parallel,
            config=self._config,
            tp_group=self.tp_group,
        )

    def _common(self) -> dict[str, Any]:
        return {"config": self._config, "bias": False, "tp_group": self.tp_group}


class ReplicatedLinears:
    """Whole maps, equal on every tensor-parallel rank; they see whole sequences, so no gradient is partial."""

    tp_size = 1
    norm_group: Group = None

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def column(self, in_features: int, out_features: int, init: Init) -> nn.Module:
        linear = nn.Linear(in_features, out_features, bias=False, dtype=self.dtype)
        init(linear.weight)
        return linear

    row = column
