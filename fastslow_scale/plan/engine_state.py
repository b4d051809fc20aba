"""What DeepSpeed holds on one rank: weights, gradients, optimizer, buffers, by ZeRO stage and dtype.

After ZeRO (arXiv 1910.02054, section 3), recounted for DeepSpeed 0.19.8 as `train/engine.py` sets it. Notation: N
elements of the rank, of which n are trained; d data-parallel ranks; e bytes of an element (4 or 2); k bucket elements;
w the largest weight's elements. Bytes:

    stage, dtype   weights   optimizer   gradients    between       at the end of the backward
                                         always       micro-batches
    0 fp32         4 N       8 n         -            4 n           4 n + their flat copy
    1 fp32         4 N       12 n / d    -            4 n           4 n + buckets
    1 bf16         2 N       12 n / d    4 n          2 n           2 n + 4 n, see `flat_copies`
    2 fp32         4 N       12 n / d    -            4 n / d       8 n / d + buckets + 4 w
    2 bf16         2 N       12 n / d    -            4 n / d       8 n / d, or 4 n / d + buckets + 6 k + 2 w
    3              e N / d   12 n / d    4 n / d      -             (e + 4) w; a bucket in fp32 stays; weights gathered
                                                                    while in use

Optimizer: fp32 master weights and AdamW's two moments; with ZeRO-0 in fp32 the weights are their own masters. Buckets
are k e bytes, two where the gradients do not fit into one or where reductions overlap with the backward (GPUs).
"""

from __future__ import annotations

from dataclasses import dataclass

from fastslow_scale.config import Config
from fastslow_scale.plan.activations import FP32, element_bytes
from fastslow_scale.plan.parameters import optimizer_groups, rank_weights

FLAT_ELEMENTS = 500_000_000
"""DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE: gradients are joined into one flat tensor until it holds more than these."""

PERSISTENT_ELEMENTS = 100_000
"""stage3_param_persistence_threshold: smaller weights stay whole on every rank."""

REUSE_ELEMENTS = 1_000_000_000
"""stage3_max_reuse_distance: a gathered weight is kept if it is needed again before so many others are."""


@dataclass(frozen=True)
class EngineState:
    """Bytes on one rank.

    Attributes:
        weights, optimizer: at all times.
        gradients: at all times.
        buffers: of the engine, at all times.
        gathered: ZeRO-3's whole weights between the forward and the backward.
        held: gradients beside `gradients` from the first micro-batch of a step to the last, if there are several.
        buckets: there during the last backward.
        reduction: what is there beside the first four at the end of the last backward, when no activation is left.
    """

    weights: int
    optimizer: int
    gradients: int
    buffers: int
    gathered: int
    held: int
    buckets: int
    reduction: int

    @property
    def always(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.buffers


def engine_state(config: Config, dp: int, bucket_elements: int, on_gpu: bool) -> EngineState:
    """What the engine of one rank holds; dp: data-parallel ranks."""
    stage, element = config.parallel.zero_stage, element_bytes(config)
    own, groups = rank_weights(config), optimizer_groups(config)
    every, trained, largest = sum(own), sum(groups), max(own)
    if on_gpu and stage == 2:
        bucket_elements = max(bucket_elements, largest)  # `bucket_elements` of train/engine.py says why
    shard = -(-trained // dp)
    bucket = bucket_elements * element
    buckets = bucket * (2 if on_gpu else 1)
    most_buckets = bucket * (2 if on_gpu or trained > bucket_elements else 1)
    weights, optimizer, gradients, buffers, gathered = element * every, 3 * FP32 * shard, 0, 0, 0
    if stage == 0:
        optimizer, held, buckets = 2 * FP32 * trained, FP32 * trained, 0
        reduction = held + FP32 * min(trained, FLAT_ELEMENTS + largest)
    elif stage == 1 and element == FP32:
        held = FP32 * trained
        reduction = held + most_buckets
    elif stage == 1:
        gradients, held, buckets = FP32 * trained, element * trained, 0
        reduction = held + max(flat_copies(groups))
    elif stage == 2 and element == FP32:
        held = FP32 * shard
        reduction = held + element * (shard + largest) + most_buckets
    elif stage == 2:
        held = FP32 * shard
        copies = (element + FP32) * min(bucket_elements, trained)  # a full bucket, flat and then in fp32
        reduction = held + max(FP32 * shard, buckets + copies + element * largest)
    else:
        small = sum(size for size in own if size < PERSISTENT_ELEMENTS)
        weights = element * (-(-every // dp) + small)
        gradients, buffers, held, buckets = FP32 * shard, FP32 * bucket_elements, 0, 0
        gathered = element * min(every - small, REUSE_ELEMENTS // 2 + largest)
        reduction = (element + FP32) * largest
    if config.gradient_accumulation_steps(dp) == 1:
        held = 0
    elif stage == 1 and element == FP32:
        held, buckets = held + buckets, 0  # the bucket of the first micro-batch stays for the others
    return EngineState(weights, optimizer, gradients, buffers, gathered, held, buckets, reduction)


def flat_copies(groups: list[int]) -> list[int]:
    """Bytes of each of BF16_Optimizer's reductions: fp32 gradients of whole groups joined; one alone is not copied."""
    copies: list[int] = []
    joined: list[int] = []
    for number, size in enumerate(groups):
        joined.append(size)
        if sum(joined) > FLAT_ELEMENTS or number == len(groups) - 1:
            copies.append(sum(joined) * FP32 if len(joined) > 1 else 0)
            joined = []
    return copies
