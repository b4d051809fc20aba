"""Seconds of one optimizer step: products by their peak, everything else by the bytes that it moves.

One rank, one micro-batch; notation of `activations.py`. Forward work F, then backward 2 F, then what is recomputed:

    products     fast layers and head / tp, exchanges whole; full recomputation repeats the layers
    attention    kernels of causal attention skip the masked half of T x T; of a window W, chunks of C queries meet W+C
                 keys (`model/window.py`); the kernel that keeps documents apart skips nothing; the backward is 2.5
                 forwards (it makes the scores again, arXiv 2205.14135)
    slow path's  all of S x S in fp32, products as any others, so that replicas stay equal (`model/slow_path.py`)
    attention
    element-wise bytes read and written by norms, residual sums, rotation, SwiGLU (`_layer_bytes`); backward twice
    loss         12 passes over fp32 logits of t V / tp elements
    gradients    20 bytes (bf16) or 12 (fp32) an element to add a micro-batch's gradient to the sum

and once a step the engine's passes over all gradients (40 bytes an element) and AdamW's (34) over this rank's share,
which is all of them with ZeRO-0.
Collectives follow (`communication.py`); `HIDDEN` says which share runs beside computation. Launching kernels is not
counted: where a layer takes less than a millisecond, a plan for a GPU is too fast.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from fastslow_scale.config import Config, ModelConfig, SlowConfig
from fastslow_scale.model.flops import count_flops
from fastslow_scale.model.window import Cut
from fastslow_scale.plan.activations import FP32, element_bytes
from fastslow_scale.plan.communication import groups_of, planned_traffic, seconds
from fastslow_scale.plan.machine import Machine
from fastslow_scale.plan.parameters import layer_sizes, optimizer_groups

ENGINE_BYTES, ADAMW_BYTES = 40, 34

HIDDEN = {"all_gather": 1 / 3, "reduce_scatter": 1 / 2}
HIDDEN_WITHOUT_SEQUENCE_PARALLEL = {"all_reduce": 1 / 2}
"""Share of tensor-parallel collectives that megatron runs beside a product:
in the backward of a column map the second gather of its input and the reduction of its input's gradient. Under sequence
parallelism all-reduces are those of the slow path and of the norms, and everything waits for them."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by cause, and what follows from them.

    Attributes:
        parts: name -> seconds; communication only as far as computation does not hide it.
        mfu: products that the model asks for over what the ranks' peak allows.
    """

    parts: dict[str, float]
    tokens_per_step: int
    mfu: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds


def step_time(config: Config, machine: Machine, bucket_elements: int) -> StepTime:
    """Predict one step of this config on all ranks of the machine."""
    train, tp = config.train, config.parallel.tensor_parallel_size
    dp = config.data_parallel_size(machine.ranks)
    micro_batches, trained = config.gradient_accumulation_steps(dp), sum(optimizer_groups(config))
    efficiency, element = machine.efficiency, element_bytes(config)
    bandwidth = machine.memory_bytes_per_second * efficiency.memory

    fast, attention, exchanges, slow_attention, head = _forward_flops(config)
    full, again = train.recompute == "full", train.recompute != "none"
    peak = machine.flops * efficiency.matmul
    kernels = machine.flops * efficiency.attention
    own_bytes, exchange_bytes = _forward_bytes(config, machine.on_gpu)
    times = 3 + full
    parts: defaultdict[str, float] = defaultdict(float)
    parts["products of the fast path"] = (fast * times + head * 3) / tp / peak * micro_batches
    parts["attention"] = attention * (3.5 + again) / tp / kernels * micro_batches
    parts["slow path"] = (
        exchanges * times / peak
        + slow_attention * (3 + again) / (machine.fp32_flops * efficiency.matmul)
        + exchange_bytes * times / bandwidth
    ) * micro_batches
    parts["element-wise"] = own_bytes * (3 + again) / bandwidth * micro_batches
    rows = config.model.padded_vocab_size // tp
    parts["loss"] = 12 * FP32 * train.micro_batch_size * train.seq_length * rows / bandwidth * micro_batches
    share = trained / (dp if config.parallel.zero_stage else 1)
    parts["gradients and optimizer"] = (
        trained * ((20 if element == 2 else 12) * micro_batches + ENGINE_BYTES) + ADAMW_BYTES * share
    ) / bandwidth
    backward = (2 / 3) * sum(parts[name] for name in ("products of the fast path", "attention", "slow path"))

    stage, groups, beside_backward = config.parallel.zero_stage, groups_of(machine, tp), 0.0
    beside_products = HIDDEN if config.parallel.sequence_parallel else HIDDEN_WITHOUT_SEQUENCE_PARALLEL
    for (name, kind), traffic in planned_traffic(config, dp, bucket_elements).items():
        spent = seconds(kind, traffic, groups[name], machine)
        if name == "tp":
            hidden = beside_products.get(kind, 0.0) if machine.hides_communication else 0.0
            parts["tensor-parallel communication"] += spent * (1 - hidden)
        elif name == "dp" and (stage == 3 or (stage == 2 and kind != "all_gather")) and machine.hides_communication:
            beside_backward += spent
        else:
            parts["data-parallel communication"] += spent
    # ZeRO-2 and 3 reduce while the backward goes on; ZeRO-0 and 1 after the last one. ZeRO-1 and 2 gather the updated
    # weights when the step is over.
    parts["data-parallel communication"] += max(0.0, beside_backward - backward)
    parts = defaultdict(float, {name: value for name, value in parts.items() if value > 0})
    total = sum(parts.values())
    asked = count_flops(config).training * train.global_batch_size
    return StepTime(dict(parts), train.tokens_per_step, asked / (total * machine.flops * machine.ranks))


def _forward_flops(config: Config) -> tuple[float, float, float, float, float]:
    """Of one micro-batch, all ranks of a tensor-parallel group together.

    Fast products, their attention, products of the exchanges, their attention, head.
    """
    model, slow, length, batch = config.model, config.slow, config.train.seq_length, config.train.micro_batch_size
    counted, window = count_flops(config), min(length, model.attention_window or length)
    _, _, heads, _, size = layer_sizes(model)
    each = model.num_hidden_layers * 4 * length * heads * size
    met = float(length) if config.data.reset_at_document else length / 2
    if window < length:
        met = window + Cut(length, window).chunk
    products = counted.fast_layers - each * window
    slow_attention = 0.0
    if counted.exchanges:
        blocks, (_, _, slow_heads, _, slow_size) = length // slow.pool_size, layer_sizes(slow)
        slow_attention = len(slow.exchange_after) * slow.num_layers * 4 * blocks * blocks * slow_heads * slow_size
    of_sequence = products, each * met, counted.exchanges - slow_attention, slow_attention, counted.head
    fast, attention, exchanges, slow_attention, head = (part * batch for part in of_sequence)
    return fast, attention, exchanges, slow_attention, head


def _forward_bytes(config: Config, on_gpu: bool) -> tuple[float, float]:
    """Bytes that the element-wise work of one forward moves on one rank: fast layers, exchanges."""
    model, slow, train, tp = config.model, config.slow, config.train, config.parallel.tensor_parallel_size
    element, tokens = element_bytes(config), train.seq_length * train.micro_batch_size
    stream = tokens / tp if config.parallel.sequence_parallel else tokens
    fast = model.num_hidden_layers * _layer_bytes(model, tokens / tp, stream, element, on_gpu)
    if model.variant == "dense" or train.seq_length <= slow.pool_size:
        return fast, 0.0
    blocks = train.seq_length // slow.pool_size * train.micro_batch_size
    layers = slow.num_layers * _layer_bytes(slow, blocks, blocks, element, on_gpu)
    if on_gpu:  # plain attention: scores written, masked, made weights, and read
        _, _, heads, _, _ = layer_sizes(slow)
        layers += slow.num_layers * 6 * FP32 * heads * blocks * (train.seq_length // slow.pool_size)
    # The mean reads the stream, the sum after `spread` reads and writes it; phi's inner part is read and written twice.
    ties = 4 * stream * model.hidden_size * element + 4 * blocks * (slow.phi_intermediate_size or 0) * element
    return fast, len(slow.exchange_after) * (layers + ties)


def _layer_bytes(section: ModelConfig | SlowConfig, tokens: float, stream: float, element: int, on_gpu: bool) -> float:
    """Reads and writes of one layer's forward, in elements: norm 2 D fused or 8 D, residual sum 3 D, twice each;
    rotation 10 (H + K) h; attention's inputs and output 4 H h + 2 K h; SwiGLU 5 I."""
    hidden, inner, heads, pairs, size = layer_sizes(section)
    norm = 2 * element if on_gpu else 8 * FP32
    return 2 * stream * hidden * (norm + 3 * element) + tokens * element * (
        10 * (heads + pairs) * size + (4 * heads + 2 * pairs) * size + 5 * inner
    )
