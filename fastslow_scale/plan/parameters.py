"""Weights by part of the model, from the config alone.

Notation: D hidden_size, H query and K key-value heads of size h, I intermediate_size, V padded vocabulary, F phi's
inner size; the slow path has its own D, H, K, h, I. Elements:

    embedding, head      V D                                            cut over tensor-parallel ranks
    fast layer           D (H + 2 K) h + D D + 3 D I, two norms of D    matrices cut, norms whole
    exchange             D D_slow + slow layers + D_slow F + F D,       whole
                         norms of D and D_slow, gate of D
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fastslow_scale.config import Config, ModelConfig, SlowConfig


@dataclass(frozen=True)
class Weight:
    """`count` equal weights of `elements` each.

    Attributes:
        cut: over tensor-parallel ranks; else whole on each.
        group: the optimizer's parameter group by its name in `parameter_groups`, or None: not trained.
    """

    elements: int
    group: str | None
    cut: bool = False
    count: int = 1

    def on_rank(self, tp: int) -> int:
        """Elements of one of them on one rank."""
        return self.elements // tp if self.cut else self.elements


@dataclass(frozen=True)
class Part:
    name: str
    weights: tuple[Weight, ...]

    @property
    def elements(self) -> int:
        return sum(weight.count * weight.elements for weight in self.weights)

    def on_rank(self, tp: int) -> int:
        return sum(weight.count * weight.on_rank(tp) for weight in self.weights)


def parameter_parts(config: Config) -> list[Part]:
    """Embedding, fast layers, exchanges, and what comes last."""
    model = config.model
    hidden, layers, vocabulary = model.hidden_size, model.num_hidden_layers, model.padded_vocab_size * model.hidden_size
    norm = Weight(hidden, "fast.no_decay")
    matrices = [Weight(size, "fast.decay", cut=True, count=layers) for size in layer_matrices(model)]
    head = () if model.tie_word_embeddings else (Weight(vocabulary, "fast.decay", cut=True),)
    exchanges = range(len(config.slow.exchange_after) if model.variant != "dense" else 0)
    return [
        Part("embedding", (Weight(vocabulary, "fast.decay", cut=True),)),
        Part("fast layers", (*matrices, Weight(hidden, "fast.no_decay", count=2 * layers))),
        *(Part(f"exchange {k}", tuple(_exchange(config))) for k in exchanges),
        Part("norm and head", (norm, *head)),
    ]


def rank_weights(config: Config) -> list[int]:
    """Elements of each weight of one rank."""
    tp = config.parallel.tensor_parallel_size
    return [w.on_rank(tp) for part in parameter_parts(config) for w in part.weights for _ in range(w.count)]


def optimizer_groups(config: Config) -> list[int]:
    """Trained elements of one rank by parameter group, in the order in which `parameter_groups` meets them."""
    tp, groups = config.parallel.tensor_parallel_size, dict.fromkeys(GROUPS, 0)
    for part in parameter_parts(config):
        for weight in part.weights:
            if weight.group is not None:
                groups[weight.group] += weight.count * weight.on_rank(tp)
    return [size for size in groups.values() if size]


GROUPS = ("fast.decay", "fast.no_decay", "gate.no_decay", "slow.no_decay", "slow.decay")


def layer_sizes(section: ModelConfig | SlowConfig) -> tuple[int, int, int, int, int]:
    """D, I, H, K, h of one path."""
    hidden, inner, heads = section.hidden_size, section.intermediate_size, section.num_attention_heads
    pairs = section.num_key_value_heads or heads
    assert hidden and inner and heads and pairs, "filled by Config"
    return hidden, inner, heads, pairs, section.head_dim


def layer_matrices(section: ModelConfig | SlowConfig) -> list[int]:
    """Elements of qkv, o, gate_up and down of one layer."""
    hidden, inner, heads, pairs, size = layer_sizes(section)
    return [hidden * (heads + 2 * pairs) * size, hidden * hidden, 2 * hidden * inner, hidden * inner]


def _exchange(config: Config) -> Iterable[Weight]:
    """The weights of one exchange; which of them learn depends on the variant."""
    slow, hidden = config.slow, config.model.hidden_size
    width, inner = slow.hidden_size, slow.phi_intermediate_size
    assert width and inner, "filled by Config"
    learns = config.model.variant in ("coupled", "shuffled")
    last_map = learns or config.model.variant == "frozen_slow"
    matrix, norm = ("slow.decay", "slow.no_decay") if learns else (None, None)
    yield Weight(hidden, "gate.no_decay" if last_map else None)
    yield Weight(hidden, norm)  # pool_norm
    yield Weight(hidden * width, matrix)  # pool_proj
    if slow.num_layers:
        yield Weight(width, norm, count=2 * slow.num_layers)
        for size in layer_matrices(slow):
            yield Weight(size, matrix, count=slow.num_layers)
    yield Weight(width, norm)  # phi_norm
    yield Weight(width * inner, matrix)  # phi_up
    yield Weight(inner * hidden, "slow.decay" if last_map else None)  # phi_down
