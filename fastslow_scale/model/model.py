"""The fast-slow decoder: embedding, fast layers, exchanges between them, head."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import nn

from fastslow_scale.config import Config, ParallelConfig
from fastslow_scale.model.attention import causal_attention, rope_table
from fastslow_scale.model.coupling import Exchange, Tokens
from fastslow_scale.model.documents import BlockDocuments, Documents
from fastslow_scale.model.init import InitScheme
from fastslow_scale.model.layers import Layer, Rope
from fastslow_scale.model.linear import TensorParallelLinears
from fastslow_scale.model.loss import IGNORE, VocabularySlice, cross_entropy_sum, token_losses
from fastslow_scale.model.norm import RMSNorm
from fastslow_scale.parallel.mesh import Mesh
from fastslow_scale.parallel.sharing import full_shape


class FastSlowModel(nn.Module):
    """The decoder of one rank. Weight names are Llama's (without the leading `model.`) plus `exchanges.K`."""

    def __init__(self, config: Config, mesh: Mesh, dtype: torch.dtype):
        super().__init__()
        model, slow, seed = config.model, config.slow, config.train.seed
        self.config, self.mesh = config, mesh
        self.sequence_parallel = config.parallel.sequence_parallel
        linears = TensorParallelLinears(mesh, self.sequence_parallel, dtype)
        init = InitScheme(seed, model.initializer_range, model.num_hidden_layers)
        hidden, vocab = model.hidden_size, model.padded_vocab_size

        self.embed_tokens = linears.embedding(vocab, hidden, init.weight("embed_tokens.weight", fan_in=hidden))
        self.layers = nn.ModuleList(
            Layer(
                f"layers.{i}",
                hidden_size=hidden,
                intermediate_size=model.intermediate_size,
                num_attention_heads=model.num_attention_heads,
                num_key_value_heads=model.key_value_heads,
                rms_norm_eps=model.rms_norm_eps,
                window=model.attention_window,
                recompute=config.train.recompute,
                dtype=dtype,
                linears=linears,
                init=init,
            )
            for i in range(model.num_hidden_layers)
        )
        after = slow.exchange_after if model.variant != "dense" else []
        self.exchange_at = {layer: k for k, layer in enumerate(after)}
        self.exchanges = nn.ModuleList(
            Exchange(f"exchanges.{k}", model, slow, seed, config.train.recompute, dtype) for k in range(len(after))
        )
        self.norm = RMSNorm(hidden, model.rms_norm_eps, dtype, linears.norm_group)
        self.lm_head = LMHead(hidden, vocab, model.vocab_size, mesh, self.sequence_parallel, linears, init)
        if model.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        freeze(self.exchanges, model.variant)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        """Sum of the losses of all tokens whose label is not IGNORE. tokens, labels: [B, T] ids -> scalar.

        documents: keep them apart; None: the whole row is one.
        """
        padding = self.hidden_length(tokens.shape[1]) - tokens.shape[1]
        labels = F.pad(labels, (0, padding), value=IGNORE).t()
        return self.lm_head(self.hidden(tokens, documents), labels.reshape(-1))

    def token_losses(
        self, tokens: torch.Tensor, labels: torch.Tensor, documents: Documents | None = None
    ) -> torch.Tensor:
        """The loss of every token, without gradients: [B, T] and [B, T] -> [B, T]."""
        batch, length = tokens.shape
        padding = self.hidden_length(length) - length
        flat = F.pad(labels, (0, padding), value=IGNORE).t().reshape(-1)
        losses = self.lm_head(self.hidden(tokens, documents), flat, per_token=True)
        return losses.view(-1, batch).t()[:, :length]

    def logits(self, tokens: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        """Logits of the whole vocabulary, padding removed: [B, T] -> [B, T, vocab_size], on every rank."""
        return self.lm_head.logits(self.hidden(tokens, documents)).transpose(0, 1)[:, : tokens.shape[1]]

    def hidden(self, tokens: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        """The normed output of the last layer: [B, T] -> [t, B, D], t = this rank's tokens, padding included."""
        length = tokens.shape[1]
        padded = self.hidden_length(length)
        x = self.embed_tokens(F.pad(tokens, (0, padded - length)))
        if not self.sequence_parallel:
            x = x.transpose(0, 1).contiguous()
        first = x.shape[0] * self.mesh.tp_rank if self.sequence_parallel else 0
        group = self.mesh.tp_group if self.sequence_parallel else None
        slow_rope = self._slow_rope(length, x)
        attend, apart = causal_attention, None
        if documents is not None:
            documents = documents.padded(padded)
            attend = documents.attend
            if slow_rope is not None:
                apart = BlockDocuments.of(documents, self.config.slow.pool_size, length, first, x.shape[0])
        span = Tokens(length, first, group, apart)

        rope = rope_table(padded, self.config.model.head_dim, self.config.model.rope_theta, like=x)
        y = None
        for number, layer in enumerate(self.layers, start=1):
            x = layer(x, rope, attend)
            if number in self.exchange_at and slow_rope is not None:
                x, y = self.exchanges[self.exchange_at[number]](x, y, span, slow_rope)
        return self.norm(x)

    def hidden_length(self, length: int) -> int:
        """The sequence's length padded so that sequence-parallel ranks hold equally many tokens."""
        parts = self.mesh.tp_size if self.sequence_parallel else 1
        return -(-length // parts) * parts

    def _slow_rope(self, length: int, like: torch.Tensor) -> Rope | None:
        """Angles for the block indices; None where no exchange can happen: no block ends before another token."""
        pool_size = self.config.slow.pool_size
        if not self.exchanges or length <= pool_size:
            return None
        return rope_table(length // pool_size, self.config.slow.head_dim, self.config.model.rope_theta, like)


class LMHead(nn.Module):
    """The output projection, its rows cut over ranks, and the loss that never needs all of its logits."""

    def __init__(
        self,
        hidden_size: int,
        padded_vocab_size: int,
        vocab_size: int,
        mesh: Mesh,
        sequence_parallel: bool,
        linears: TensorParallelLinears,
        init: InitScheme,
    ):
        super().__init__()
        head = linears.column(hidden_size, padded_vocab_size, init.weight("lm_head.weight", fan_in=hidden_size))
        self.weight: nn.Parameter = head.weight  # type: ignore[assignment]
        self.tp_group = mesh.tp_group
        self.sequence_parallel = sequence_parallel
        rows = padded_vocab_size // mesh.tp_size
        self.vocabulary = VocabularySlice(mesh.tp_rank * rows, rows, vocab_size, mesh.tp_group)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor, per_token: bool = False) -> torch.Tensor:
        """[t, B, D] of this rank and [T * B] labels -> the summed loss, or every token's without gradients, [T * B]."""
        loss = token_losses if per_token else cross_entropy_sum
        return loss(self._whole(hidden).flatten(0, 1), self.weight, labels, self.vocabulary)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[t, B, D] of this rank -> [T, B, vocab_size]."""
        own = F.linear(self._whole(hidden), self.weight)
        if self.tp_group.size() > 1:
            parts = [torch.empty_like(own) for _ in range(self.tp_group.size())]
            dist.all_gather(parts, own.contiguous(), group=self.tp_group)
            own = torch.cat(parts, dim=-1)
        return own[..., : self.vocabulary.vocab_size]

    def _whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """All tokens on every rank; the backward sums the ranks' parts of the gradient (each has its own rows)."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)


def freeze(exchanges: nn.ModuleList, variant: str) -> None:
    """Take out of training what the variant holds fixed."""
    for name, param in exchanges.named_parameters():
        if variant == "frozen":
            param.requires_grad_(False)
        elif variant == "frozen_slow":
            param.requires_grad_(name.endswith((".gate", ".phi_down.weight")))


def build_model(config: Config, mesh: Mesh, dtype: torch.dtype | None = None) -> FastSlowModel:
    """The model of this rank, initialised on the CPU from the seed. `dtype` None: the config's."""
    if dtype is None:
        dtype = torch.bfloat16 if config.train.dtype == "bf16" else torch.float32
    return FastSlowModel(config, mesh, dtype)


def count_parameters(config: Config, mesh: Mesh) -> int:
    """Parameters of the whole model, vocabulary padding included, without allocating any of them.

    The config's own layout does not matter: a mesh of this process alone will do.
    """
    whole = config.model_copy(update={"parallel": ParallelConfig(tensor_parallel_size=mesh.tp_size)})
    with torch.device("meta"):
        model = build_model(whole, mesh)
    return sum(math.prod(full_shape(p, mesh.tp_size)) for p in model.parameters())
