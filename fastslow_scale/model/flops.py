"""Floating-point operations of a model, from its config alone: a multiplication and an addition count as two.

Notation: T tokens, D hidden_size, H query and K key-value heads of size h, I intermediate_size, L layers, V padded
vocabulary, P pool_size, S = T // P blocks. Per sequence, forward:

    fast layer      T (2 D (H + 2 K) h + 2 H h D + 6 D I) + 4 T W H h        W: positions a token attends to
    exchange        S (2 D D_slow) + slow layers as above, with S for T + S (2 D_slow F + 2 F D)     F: phi's inner size
    head            T 2 D V

Norms, softmax and other work that is not a matrix product is left out. Attention counts all T positions a token, as
dense kernels and the literature's figures do, not the half that is causal; with a window it counts the window. That is
what the model asks for: what the chunks of model/window.py meet beyond it is the implementation's, and utilisation is
the lower for it. The backward takes twice the forward (PaLM, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

from dataclasses import dataclass

from fastslow_scale.config import Config, ModelConfig, SlowConfig


@dataclass(frozen=True)
class Flops:
    """Operations of one sequence's forward pass, by part."""

    fast_layers: int
    exchanges: int
    head: int

    @property
    def forward(self) -> int:
        return self.fast_layers + self.exchanges + self.head

    @property
    def training(self) -> int:
        """Forward and backward."""
        return 3 * self.forward


def count_flops(config: Config) -> Flops:
    """Count one sequence of `train.seq_length` tokens. Recomputation is left out: no work that the model asks for."""
    model, slow, length = config.model, config.slow, config.train.seq_length
    seen = min(length, model.attention_window or length)
    fast = model.num_hidden_layers * _layer(model, length, seen)
    exchanges = 0
    if model.variant != "dense" and length > slow.pool_size:
        exchanges = len(slow.exchange_after) * _exchange(model, slow, length // slow.pool_size)
    return Flops(fast, exchanges, length * 2 * model.hidden_size * model.padded_vocab_size)


def _layer(section: ModelConfig | SlowConfig, length: int, seen: int) -> int:
    hidden, inner, heads = section.hidden_size, section.intermediate_size, section.num_attention_heads
    pairs = section.num_key_value_heads or heads
    assert hidden and inner and heads and pairs, "filled by Config"
    size = section.head_dim
    projections = 2 * hidden * (heads + 2 * pairs) * size + 2 * heads * size * hidden + 6 * hidden * inner
    return length * (projections + 4 * seen * heads * size)


def _exchange(model: ModelConfig, slow: SlowConfig, blocks: int) -> int:
    width, inner = slow.hidden_size, slow.phi_intermediate_size
    assert width and inner, "filled by Config"
    entrance = 2 * model.hidden_size * width
    phi = 2 * width * inner + 2 * inner * model.hidden_size
    return blocks * (entrance + phi) + slow.num_layers * _layer(slow, blocks, blocks)
