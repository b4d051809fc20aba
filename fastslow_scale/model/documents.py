"""Documents that share a row and must not see each other (`data.reset_at_document`).

The grid of blocks stays where it is: a document may begin in the middle of a block. A block belongs to the document of
its last token; it pools only that document's tokens and gives only to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fastslow_scale.model.window import Cut, Masks, windowed_attention


@dataclass(frozen=True)
class Documents:
    """Which document each token (or block) of a row belongs to: ids [B, T], equal where the document is the same."""

    ids: torch.Tensor
    _masks: dict[tuple[int, int, torch.dtype], Masks] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of_tokens(cls, tokens: torch.Tensor, eos_id: int) -> Documents:
        """tokens [B, T]: a document begins with the end mark that precedes its first word.

        So every word of a document, the first one too, is predicted from this document alone, and no loss is left out.
        """
        return cls((tokens == eos_id).cumsum(1))

    def padded(self, length: int) -> Documents:
        """Tokens up to `length`, which come after all others, join the last document.

        Always a new object, whose masks go when the pass that made them is over.
        """
        missing = length - self.ids.shape[1]
        return Documents(torch.cat([self.ids, self.ids[:, -1:].expand(-1, missing)], 1))

    def of_blocks(self, pool_size: int, num_blocks: int) -> Documents:
        """The document of each block's last token: [B, S]."""
        return Documents(self.ids[:, pool_size - 1 : num_blocks * pool_size : pool_size])

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
        """`causal_attention` within each document: q [B, H, T, head_dim], k and v [B, G, T, head_dim]."""
        length, repeats = q.shape[2], q.shape[1] // k.shape[1]
        # A window of the whole length leaves the mask of documents alone.
        cut = Cut(length, min(window or length, length))
        # One for all layers: with documents it grows with the batch, and each layer's backward holds on to it.
        masks = self._masks.get((cut.window, repeats, q.dtype))
        if masks is None:
            masks = self._masks[cut.window, repeats, q.dtype] = Masks.of(cut, repeats, like=q, documents=self.ids)
        return windowed_attention(q, k, v, cut, masks)


@dataclass(frozen=True)
class BlockDocuments:
    """What an exchange must know of documents, for a rank that holds t of the T tokens.

    Attributes:
        pooled: whether a token counts in its block's mean, [t, B, 1].
        counted: how many tokens of a block do, [S, B, 1].
        served: whether a token may receive what the block before its own gives, [t, B, 1].
        blocks: for the slow layers' attention.
    """

    pooled: torch.Tensor
    counted: torch.Tensor
    served: torch.Tensor
    blocks: Documents

    @classmethod
    def of(cls, documents: Documents, pool_size: int, total: int, first: int, count: int) -> BlockDocuments:
        """For tokens first .. first + count - 1 of a sequence of `total` tokens; `documents` may hold padding too."""
        num_blocks = total // pool_size
        ids, blocks = documents.ids, documents.of_blocks(pool_size, num_blocks)
        block = torch.arange(first, first + count, device=ids.device) // pool_size
        own = ids[:, first : first + count]

        def owner(number: torch.Tensor) -> torch.Tensor:
            """The document of block `number` for each of this rank's tokens, [B, t]; -1 for a block that is not one."""
            found = blocks.ids[:, number.clamp(0, num_blocks - 1)]
            return found.where((number >= 0) & (number < num_blocks), -1)

        whole = ids[:, : num_blocks * pool_size].unflatten(1, (num_blocks, pool_size))
        counted = (whole == blocks.ids[:, :, None]).sum(-1)
        return cls(
            pooled=(own == owner(block)).t()[..., None],
            counted=counted.t()[..., None],
            served=(own == owner(block - 1)).t()[..., None],
            blocks=blocks,
        )
