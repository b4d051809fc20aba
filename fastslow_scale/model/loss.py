"""Cross-entropy over a vocabulary that is cut over tensor-parallel ranks, without ever holding all the logits.

The tokens are taken in chunks. For each chunk the logits are made, turned into losses and into the gradients of the
head's input and weight, and forgotten: peak memory is one chunk of fp32 logits, and nothing is computed twice.
Precedents: megatron's vocab-parallel loss (arXiv 1909.08053), Liger's fused linear cross-entropy (arXiv 2410.10989).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

IGNORE = -100
CHUNK_ELEMENTS = 2**22
FEWEST_TOKENS = 256
"""Of a chunk, however many logits they have: each chunk passes over the gradient of the whole weight once."""


@dataclass(frozen=True)
class VocabularySlice:
    """Rows [first, first + rows) of the padded vocabulary live on this rank; ids from `vocab_size` on are padding."""

    first: int
    rows: int
    vocab_size: int
    group: dist.ProcessGroup


def chunk_tokens(rows: int) -> int:
    """Tokens whose fp32 logits over `rows` vocabulary entries take at most 16 MB, but not fewer than 256."""
    return max(FEWEST_TOKENS, CHUNK_ELEMENTS // rows)


def cross_entropy_sum(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, vocabulary: VocabularySlice
) -> torch.Tensor:
    """Sum over tokens of -log softmax(hidden W^T)[label]; tokens labelled IGNORE count nothing.

    Args:
        hidden: [N, D], equal on every tensor-parallel rank.
        weight: [rows, D], this rank's rows of the head.
        labels: [N] ids, equal on every rank.

    Returns:
        A scalar in fp32 (fp64 for fp64 input), equal on every rank. d(hidden) holds this rank's part of the sum over
        the vocabulary: the caller reduces it over the ranks.
    """
    return _CrossEntropySum.apply(hidden, weight, labels, vocabulary, torch.is_grad_enabled())


def token_losses(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, vocabulary: VocabularySlice
) -> torch.Tensor:
    """The loss of each token, [N], without gradients; 0 where the label is IGNORE."""
    step = chunk_tokens(weight.shape[0])
    with torch.no_grad():
        parts = [
            _chunk(hidden[i : i + step], weight, labels[i : i + step], vocabulary)[0]
            for i in range(0, hidden.shape[0], step)
        ]
    return torch.cat(parts)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        vocabulary: VocabularySlice,
        with_grad: bool,
    ) -> torch.Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if with_grad else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if with_grad else None
        step = chunk_tokens(weight.shape[0])
        for i in range(0, hidden.shape[0], step):
            part, target = hidden[i : i + step], labels[i : i + step]
            losses, probabilities, hit, local = _chunk(part, weight, target, vocabulary)
            total += losses.sum()
            if grad_hidden is None or grad_weight is None:
                continue
            # d loss / d logits = softmax - one_hot(label), nothing for ignored tokens.
            grad_logits = probabilities.mul_((target != IGNORE).unsqueeze(-1))
            grad_logits[torch.arange(len(target), device=target.device), local] -= hit.to(wide)
            grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[i : i + step])
            if grad_weight.dtype == grad_logits.dtype:
                grad_weight.addmm_(grad_logits.t(), part)
            else:
                grad_weight += grad_logits.t() @ part
            del losses, probabilities, grad_logits  # before the next chunk's logits are made
        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype), total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight, total = ctx.saved_tensors
        # Zero for a finite loss; makes the gradient of an infinite loss non-finite too, so that the step is refused.
        grad = grad + 0 * total
        return grad_hidden * grad.to(grad_hidden.dtype), grad_weight * grad.to(grad_weight.dtype), None, None, None


def _chunk(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, vocabulary: VocabularySlice
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses [n], softmax over this rank's rows [n, rows], which labels live here [n], their row here [n]."""
    logits = hidden @ weight.t()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    own = max(0, min(vocabulary.rows, vocabulary.vocab_size - vocabulary.first))
    logits[:, own:] = -torch.inf
    hit = (labels >= vocabulary.first) & (labels < vocabulary.first + own)
    local = (labels - vocabulary.first) * hit
    target = logits.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(~hit, 0.0)
    peak = logits.amax(1) if own else torch.full_like(target, torch.finfo(logits.dtype).min)
    scaled = logits.sub_(peak.unsqueeze(1)).exp_()
    mass = scaled.sum(1)
    if vocabulary.group.size() > 1:
        # One collective: every rank combines every rank's (peak, mass, target) in the same order, so all agree bitwise.
        local_statistics = torch.stack([peak, mass, target])
        everyone = local_statistics.new_empty(vocabulary.group.size(), *local_statistics.shape)
        dist.all_gather_into_tensor(everyone.flatten(0, 1), local_statistics, group=vocabulary.group)
        peaks, masses, targets = everyone.unbind(1)
        top, target = peaks.amax(0), targets.sum(0)
        whole = (masses * (peaks - top).exp()).sum(0)
        scaled.mul_(((peak - top).exp() / whole).unsqueeze(1))
        peak, mass = top, whole
    else:
        scaled.div_(mass.unsqueeze(1))
    losses = (mass.log() + peak - target).masked_fill(labels == IGNORE, 0.0)
    return losses, scaled, hit, local
