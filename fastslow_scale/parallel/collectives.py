"""The collectives that tie replicated and sharded parts together.

The rule: a replicated parameter's gradient is complete when it reaches the parameter. So wherever a replicated tensor
meets tokens that are split over tensor-parallel ranks (sequence parallelism), the operation that uses it reduces in its
own backward:

    complete_grad(w)   forward w,                  backward all-reduce of dw     norms under sequence parallelism
    pool(x)            forward all-reduce of sums, backward identity             fast -> slow
    spread(c)          forward c to own tokens,    backward all-reduce of dc     slow -> fast

`pool` and `spread` are each other's transpose. Reducing in both directions of one of them would count a gradient
tp_size times; each reduces exactly once. `group` is None where the sequence is whole on every rank: then nothing is
reduced at all, for the same reason.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

Group = dist.ProcessGroup | None


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    # A copy: an in-place sum would change a gradient that autograd may still hand to another branch.
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _ReduceBackward(torch.autograd.Function):
    """Forward identity, backward all-reduce."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _ReduceForward(torch.autograd.Function):
    """Forward all-reduce, backward identity."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _all_reduce(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def complete_grad(weight: torch.Tensor, group: Group) -> torch.Tensor:
    """Use a replicated weight on this rank's own tokens; its gradient arrives summed over all ranks' tokens."""
    return weight if group is None else _ReduceBackward.apply(weight, group)


def pool(x: torch.Tensor, pool_size: int, num_blocks: int, first_token: int, group: Group) -> torch.Tensor:
    """Mean over each complete block of P tokens: p_b = (1/P) sum of x_t over t // P == b.

    Args:
        x: [t, B, D], this rank's tokens, the first of which is number `first_token` of the sequence.
        pool_size: P, tokens per block; blocks may straddle ranks.
        num_blocks: S, the complete blocks of the sequence. Tokens after them are left out.
        first_token: 0 where `group` is None.
        group: the ranks that hold the other tokens, or None.

    Returns:
        [S, B, D] on every rank, in x's dtype; the sums are taken in fp32 (fp64 for fp64 x).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    mine = max(0, min(x.shape[0], num_blocks * pool_size - first_token))
    first_block, lead = divmod(first_token, pool_size)
    tail = -(lead + mine) % pool_size
    if mine:
        blocks = F.pad(x[:mine], (0, 0, 0, 0, lead, tail)) if lead or tail else x[:mine]
        sums = blocks.unflatten(0, (-1, pool_size)).sum(1, dtype=wide)
    else:
        # Zeros that are still a function of x, so that every rank runs the same backward.
        sums = x[:0].sum(0, keepdim=True, dtype=wide)
        first_block = 0
    if group is not None:
        sums = F.pad(sums, (0, 0, 0, 0, first_block, num_blocks - first_block - sums.shape[0]))
        sums = _ReduceForward.apply(sums, group)
    return (sums / pool_size).to(x.dtype)


def spread(c: torch.Tensor, pool_size: int, num_tokens: int, first_token: int, group: Group) -> torch.Tensor:
    """Hand each token the contribution of the last block that ended before its own began: c_{t // P - 1}.

    Args:
        c: [S, B, D], equal on every rank.
        pool_size: P.
        num_tokens: t, the tokens of this rank.
        first_token: their first one's number in the sequence.
        group: the ranks that hold the other tokens, or None.

    Returns:
        [t, B, D]; zero for the tokens of block 0, which have no block before them.
    """
    if group is not None:
        c = _ReduceBackward.apply(c, group)
    first_block, lead = divmod(first_token, pool_size)
    stop_block = -(-(first_token + num_tokens) // pool_size)
    # Row b of the shifted table is what block b receives; rows past S serve padding, which receives nothing.
    shifted = F.pad(c, (0, 0, 0, 0, 1, max(0, stop_block - 1 - c.shape[0])))[first_block:stop_block]
    tokens = shifted.unsqueeze(1).expand(-1, pool_size, -1, -1).flatten(0, 1)
    return tokens[lead : lead + num_tokens]
