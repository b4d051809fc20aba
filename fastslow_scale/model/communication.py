"""How many bytes one optimizer step moves, by group and kind: the formula behind what a `Ledger` counts.

Notation: T tokens of a sequence (padded to tensor-parallel ranks), B sequences of a micro-batch, D hidden_size,
S = T // P blocks, e bytes of an element, L layers, m micro-batches of a step. A message's bytes are those of the whole
tensor that is reduced, gathered or scattered.
"""

from __future__ import annotations

from collections import defaultdict

from fastslow_scale.config import Config
from fastslow_scale.model.loss import chunk_tokens
from fastslow_scale.parallel.ledger import Entries, Traffic


def tensor_parallel_traffic(config: Config) -> Entries:
    """What one micro-batch moves between tensor-parallel ranks, forward and backward, without recomputation.

    Without sequence parallelism each of these is an all-reduce of T B D elements: embedding (forward), two projections
    back into the stream per layer (forward), two out of it per layer (backward), head (backward): 4 L + 2.

    With it, T B D elements each:
        all-gather      embedding 1 (backward), per layer 2 x (forward, backward twice) and head 1: 6 L + 2
        reduce-scatter  embedding 1, per layer 2 forward and 2 backward, head 1 (backward):         4 L + 2
        all-reduce      of D elements for each norm's gradient: 2 L + 1
    and for each exchange two all-reduces of S B D elements: `pool` forward in fp32, `spread` backward.

    The loss gathers three fp32 numbers a token from every rank, chunk by chunk.
    """
    model, train = config.model, config.train
    tp = config.parallel.tensor_parallel_size
    if tp == 1:
        return {}
    element = 2 if train.dtype == "bf16" else 4
    layers, batch, hidden = model.num_hidden_layers, train.micro_batch_size, model.hidden_size
    sequence = config.parallel.sequence_parallel
    length = -(-train.seq_length // tp) * tp if sequence else train.seq_length
    stream = Traffic(1, length * batch * hidden * element)

    traffic: defaultdict[tuple[str, str], Traffic] = defaultdict(Traffic)
    chunks = -(-length * batch // chunk_tokens(model.padded_vocab_size // tp))
    traffic["tp", "all_gather"] += Traffic(chunks, tp * 3 * 4 * length * batch)
    if not sequence:
        traffic["tp", "all_reduce"] += stream * (4 * layers + 2)
        return dict(traffic)
    traffic["tp", "all_gather"] += stream * (6 * layers + 2)
    traffic["tp", "reduce_scatter"] += stream * (4 * layers + 2)
    traffic["tp", "all_reduce"] += Traffic(1, hidden * element) * (2 * layers + 1)
    for key, exchange in exchange_traffic(config).items():
        traffic[key] += exchange
    return dict(traffic)


def exchange_traffic(config: Config) -> Entries:
    """What the slow path adds to a micro-batch under sequence parallelism: two all-reduces an exchange."""
    model, slow, train = config.model, config.slow, config.train
    if model.variant == "dense" or not config.parallel.sequence_parallel or train.seq_length <= slow.pool_size:
        return {}
    elements = train.seq_length // slow.pool_size * train.micro_batch_size * model.hidden_size
    pool = Traffic(1, 4 * elements)
    spread = Traffic(1, (2 if train.dtype == "bf16" else 4) * elements)
    return {("tp", "all_reduce"): (pool + spread) * len(slow.exchange_after)}


def optimizer_traffic(groups: list[int], config: Config, dp: int, bucket_elements: int) -> Entries:
    """What the engine moves in one step, ZeRO 0 to 2.

    Gradients: an all-reduce of all trained elements in fp32 over data-parallel ranks, once a step (ZeRO-0 and 1) or
    once a micro-batch (ZeRO-2), in pieces of at most `bucket_elements`. ZeRO-1 and 2 then all-gather the updated
    weights of each parameter group, filled up to a multiple of 2 dp. The norm sums one number over each kind of
    ranks: of all gradients together, or of each parameter group by itself; ZeRO-2 in bf16 also sums an overflow flag
    of one byte.

    Args:
        groups: trained elements on this rank, by parameter group of the optimizer.

    Raises:
        ValueError: ZeRO-3, which decides at run time what stays gathered. Measure it with a `Ledger`.
    """
    stage, bf16 = config.parallel.zero_stage, config.train.dtype == "bf16"
    if stage == 3:
        raise ValueError("ZeRO-3 decides at run time which weights stay gathered; measure it with a Ledger")
    element = 2 if bf16 else 4
    traffic: defaultdict[tuple[str, str], Traffic] = defaultdict(Traffic)
    if dp > 1:
        times = config.gradient_accumulation_steps(dp) if stage == 2 else 1
        pieces = -(-sum(groups) // bucket_elements)
        traffic["dp", "all_reduce"] += Traffic(pieces, sum(groups) * 4) * times
        if stage:
            padded = [-(-size // (2 * dp)) * (2 * dp) for size in groups]
            traffic["dp", "all_gather"] += Traffic(len(groups), sum(padded) * element)
    norms = {0: Traffic(1, 8), 1: Traffic(1, 4)}[stage] if stage == 0 or (bf16 and stage == 1) else None
    over_both = norms or Traffic(1, 4) * len(groups) + (Traffic(1, 1) if bf16 else Traffic())
    # ZeRO-0 and BF16_Optimizer hold every gradient whole: their norm needs the tensor-parallel ranks only.
    if config.parallel.tensor_parallel_size > 1:
        traffic["tp", "all_reduce"] += over_both
    if dp > 1 and norms is None:
        traffic["dp", "all_reduce"] += over_both
    return dict(traffic)


def step_traffic(config: Config, groups: list[int], dp: int, bucket_elements: int) -> Entries:
    """What this rank takes part in during one optimizer step.

    Valid tokens, mean loss and stop signal are one number each: the first two over data-parallel ranks, the last over
    all.
    """
    traffic: defaultdict[tuple[str, str], Traffic] = defaultdict(Traffic)
    for key, entry in tensor_parallel_traffic(config).items():
        traffic[key] += entry * config.gradient_accumulation_steps(dp)
    for key, entry in optimizer_traffic(groups, config, dp, bucket_elements).items():
        traffic[key] += entry
    if dp > 1:
        traffic["dp", "all_reduce"] += Traffic(2, 8)
    if dp * config.parallel.tensor_parallel_size > 1:
        traffic["world", "all_reduce"] += Traffic(1, 4)
    return dict(traffic)
