"""Bytes that a micro-batch keeps for its backward, and what its loss and backward need besides.

After Korthikanti et al., arXiv 2205.05198, section 4, recounted for this project's own layers: no dropout, SwiGLU,
grouped queries, attention that keeps no matrix of scores. Notation: T tokens of a sequence (padded to tensor-parallel
ranks), B sequences, tp tensor-parallel ranks, e bytes of an element;

    t = T B              tokens that a cut matrix product sees on every rank
    s = t / tp or t      tokens of the residual stream on this rank, with and without sequence parallelism
    n                    what a norm keeps of an element: its input and output, 2 e; on CPUs, where torch has no
                         fused norm, x and x/rms in fp32 and the output: 8 + e

    layer, recompute none     2 D s n + t e ((H + 2 K) h + (H + K) h + H h + 4 I) / tp + 4 H t / tp
                              norms; qkv, its rotated part, output; gate_up (2 I), silu, product; log-sums
    layer, selective          2 D s n + t e ((H + 2 K) h + H h + 3 I) / tp
                              norms; qkv, output; gate_up, product
    layer, full               D s e, its input
    masked attention          beside that, `kept_by_masks`
    exchange                  D b n + slow layers (tp = 1, s = t = b) + D_slow b n + b e (2 F + D),  b = (T // P) B

tests/unit/test_plan.py holds the layer's sum against what autograd really saves.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastslow_scale.config import Config, ModelConfig, SlowConfig
from fastslow_scale.model.loss import chunk_tokens
from fastslow_scale.model.window import Cut
from fastslow_scale.plan.parameters import layer_sizes

FP32 = 4


@dataclass(frozen=True)
class Activations:
    """Bytes on one rank.

    Attributes:
        fast_layers: kept by all fast layers.
        exchanges: kept by all exchanges.
        masks: of documents, one for all layers of a path.
        head: kept by the final norm.
        loss: what the loss holds at its largest, beside all that is kept.
        loss_gradients: the gradients that the loss hands back, at the moment when they are scaled: each twice.
        layer_backward: what the backward of the last layer adds to all that is kept, recomputed parts included, less
            the final norm's, which is gone by then.
        gather_buffer: megatron's buffer for whole sequences, which stays; sequence parallelism only.
    """

    fast_layers: int
    exchanges: int
    masks: int
    head: int
    loss: int
    loss_gradients: int
    layer_backward: int
    gather_buffer: int

    @property
    def kept(self) -> int:
        return self.fast_layers + self.exchanges + self.masks + self.head


def activations(config: Config, on_gpu: bool) -> Activations:
    """What the forward of one micro-batch leaves on one rank, and its largest moments."""
    model, train, tp = config.model, config.train, config.parallel.tensor_parallel_size
    sequence = config.parallel.sequence_parallel
    element = element_bytes(config)
    length = -(-train.seq_length // tp) * tp if sequence else train.seq_length
    tokens = length * train.micro_batch_size
    stream = tokens // tp if sequence else tokens
    hidden, inner, *_ = layer_sizes(model)
    norm = norm_bytes(element, on_gpu)

    masked = kept_by_masks(config, model, length, model.attention_window, element)
    layer = _kept_by_layer(model, train.recompute, tokens, stream, tp, element, norm, masked.each_layer)
    whole_layer = _kept_by_layer(model, "none", tokens, stream, tp, element, norm, masked.each_layer)
    product = tokens * inner * element // tp
    gathered = tokens * hidden * element if sequence else 0
    # Of the down projection's gradient, d gate and d up exist while one of the kept products is already gone: 2 more.
    backward = 2 * product + 2 * stream * hidden * element + gathered
    if train.recompute == "selective":
        backward += product
    elif train.recompute == "full":
        backward += whole_layer - layer

    rows = model.padded_vocab_size // tp
    chunk = min(tokens, chunk_tokens(rows)) * rows
    loss = tokens * hidden * element + rows * hidden * FP32 + gathered
    # fp32: the logits, in place all through. bf16: beside their fp32 copy, and a product for the head's gradient.
    loss += chunk * FP32 if element == FP32 else chunk * (FP32 + element) + rows * hidden * element
    return Activations(
        fast_layers=model.num_hidden_layers * layer,
        exchanges=_kept_by_exchanges(config, element, norm, on_gpu),
        masks=masked.once,
        head=hidden * stream * norm,
        loss=loss,
        loss_gradients=2 * (tokens * hidden + rows * hidden) * element,
        layer_backward=backward - hidden * stream * norm,
        gather_buffer=gathered,
    )


def element_bytes(config: Config) -> int:
    return 2 if config.train.dtype == "bf16" else FP32


def norm_bytes(element: int, on_gpu: bool) -> int:
    """n: bytes that a norm keeps of each element, its input included."""
    return 2 * element if on_gpu else 2 * FP32 + element


@dataclass(frozen=True)
class Masked:
    """Bytes that masked attention keeps beside what plain causal attention does: in each layer, and once for all."""

    each_layer: int
    once: int


def kept_by_masks(
    config: Config, section: ModelConfig | SlowConfig, length: int, window: int | None, element: int
) -> Masked:
    """`model/window.py`'s copies and masks for B sequences of `length` tokens (or blocks), on one rank.

    With N chunks of C queries after a beginning of F, R = H / K:

        copies    queries of the chunks N C H h (R > 1: instead of what the rotation made); their keys and values
                  2 (W + C) N K h, or 2 (N C + W) K h of one sequence alone; the output T H h once more
        masks     R (F^2 + C (W + C)) in each layer; of documents B R (F^2 + N C (W + C)) once
    """
    documents, batch, tp = config.data.reset_at_document, config.train.micro_batch_size, 1
    if isinstance(section, ModelConfig):
        tp = config.parallel.tensor_parallel_size
    if not documents and (window is None or window >= length):
        return Masked(0, 0)
    _, _, heads, pairs, size = layer_sizes(section)
    cut, repeats = Cut(length, min(window or length, length)), heads // pairs
    chunked = cut.chunks * cut.chunk
    met = 0
    if cut.chunks:
        met = cut.chunks * (cut.window + cut.chunk) if batch > 1 else chunked + cut.window
    copies = 2 * met * pairs * size
    if repeats == 1:
        copies += chunked * heads * size
    if repeats > 1 or cut.chunks:
        copies += length * heads * size
    copies = copies * batch * element // tp
    each_chunk = cut.chunk * (cut.window + cut.chunk) if cut.chunks else 0
    if documents:
        return Masked(copies, batch * repeats * element * (cut.beginning**2 + cut.chunks * each_chunk))
    return Masked(copies + repeats * element * (cut.beginning**2 + each_chunk), 0)


def _kept_by_layer(
    section: ModelConfig | SlowConfig,
    recompute: str,
    tokens: int,
    stream: int,
    tp: int,
    element: int,
    norm: int,
    masked: int,
) -> int:
    hidden, inner, heads, pairs, size = layer_sizes(section)
    if recompute == "full":
        return hidden * stream * element
    qkv, rotated, query = (heads + 2 * pairs) * size, (heads + pairs) * size, heads * size
    if recompute == "selective":
        cut = qkv + query + 3 * inner
        return 2 * hidden * stream * norm + tokens * element * cut // tp
    cut = qkv + rotated + query + 4 * inner
    return 2 * hidden * stream * norm + tokens * element * cut // tp + FP32 * heads * tokens // tp + masked


def _kept_by_exchanges(config: Config, element: int, norm: int, on_gpu: bool) -> int:
    model, slow, train = config.model, config.slow, config.train
    if model.variant == "dense" or train.seq_length <= slow.pool_size:
        return 0
    blocks = train.seq_length // slow.pool_size
    tokens = blocks * train.micro_batch_size
    width, inner = slow.hidden_size, slow.phi_intermediate_size
    assert width and inner, "filled by Config"
    masked = kept_by_masks(config, slow, blocks, None, element)
    layer = _kept_by_layer(slow, train.recompute, tokens, tokens, 1, element, norm, masked.each_layer)
    if on_gpu and train.recompute == "none":
        layer += kept_by_math_attention(slow, blocks, train.micro_batch_size)
    norms = (model.hidden_size + width) * tokens * norm
    phi = tokens * element * (2 * inner + model.hidden_size)
    return len(slow.exchange_after) * (norms + slow.num_layers * layer + phi) + masked.once


def kept_by_math_attention(slow: SlowConfig, blocks: int, batch: int) -> int:
    """torch's plain attention, which the slow path takes on GPUs so that replicas stay equal: B H S^2 weights in fp32.

    Kept besides: q, k and v in fp32, k and v for every head. B sequences of S blocks.
    """
    _, _, heads, _, size = layer_sizes(slow)
    return FP32 * batch * heads * (blocks * blocks + 3 * blocks * size)
