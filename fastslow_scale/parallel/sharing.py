"""How a parameter is shared between tensor-parallel ranks. Declared on the parameter, read by everyone else.

Sharded: `param.tensor_model_parallel is True` and `param.partition_dim` names the dimension that is cut into tp_size
equal, contiguous slices (megatron's attributes, set by its layers). Everything else is replicated: equal on every
tensor-parallel rank, and so are its gradients by the time they reach the parameter. The gradient norm, checkpoints
and sanity checks read this declaration and no other.
"""

from __future__ import annotations

import torch


def sharded_dim(param: torch.Tensor) -> int | None:
    """The dimension cut over tensor-parallel ranks, or None for a replicated parameter."""
    return int(param.partition_dim) if getattr(param, "tensor_model_parallel", False) else None  # type: ignore[attr-defined]


def full_shape(param: torch.Tensor, tp_size: int) -> tuple[int, ...]:
    """Shape of the whole weight of which this rank holds `param`."""
    shape, dim = list(param.shape), sharded_dim(param)
    if dim is not None:
        shape[dim] *= tp_size
    return tuple(shape)
