"""The largest moment of one rank's memory.

Between two of these moments activations only fall and gradients only rise, layer by layer, so that the sum is largest
at one of them:

    loss             engine's state + gradients held + all that the forward kept + the loss's chunk and gradients
    loss backward    the same with the loss's gradients scaled, each there twice, and the buckets
    first layer      of the backward, the model's last: what its backward adds to all that is kept
    reduction        no activation, all gradients, and the copies that the engine makes of them
"""

from __future__ import annotations

from dataclasses import dataclass

from fastslow_scale.config import Config
from fastslow_scale.plan.activations import Activations, activations, element_bytes
from fastslow_scale.plan.engine_state import EngineState, engine_state


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        engine, activations: what they consist of.
        moments: bytes at each moment.
    """

    engine: EngineState
    activations: Activations
    moments: dict[str, int]

    @property
    def peak(self) -> int:
        return max(self.moments.values())

    @property
    def peak_moment(self) -> str:
        return max(self.moments, key=lambda name: self.moments[name])


def memory(config: Config, dp: int, bucket_elements: int, on_gpu: bool) -> Memory:
    """Tensor bytes of one rank in a step after the first.

    Args:
        dp: data-parallel ranks.
        bucket_elements: the engine's `reduce_bucket_size`.
        on_gpu: which kernels run: fused norms and no others on CPUs, plain attention of the slow path on GPUs.
    """
    kept, engine = activations(config, on_gpu), engine_state(config, dp, bucket_elements, on_gpu)
    always = engine.always + kept.gather_buffer
    in_use = always + engine.gathered + engine.held + kept.kept
    rows = config.model.padded_vocab_size // config.parallel.tensor_parallel_size
    head_gradient = 0 if engine.held else rows * config.model.hidden_size * element_bytes(config)
    return Memory(
        engine,
        kept,
        {
            "loss": in_use + kept.loss,
            "loss backward": in_use + kept.loss_gradients + engine.buckets,
            "first layer": in_use + head_gradient + kept.layer_backward + engine.buckets,
            "reduction": always + engine.reduction,
        },
    )
