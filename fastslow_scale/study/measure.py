"""What a finished run is worth, in RUN/measured.json: its held-out losses, and whether its gate does anything."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from data_pipeline.files import write_durably
from fastslow_scale.config import Config
from fastslow_scale.inference.load import load_model
from fastslow_scale.study.probe import HeldOut, closed_gates, losses, swapped_states, tiny_gradients
from fastslow_scale.train.batch import open_data

FILE_NAME = "measured.json"
SEQUENCES = 128


@dataclass(frozen=True)
class Measured:
    """All losses are means over the same held-out tokens, nats.

    Attributes:
        loss, closed, swapped: as trained; with the gates at zero; with the slow states of another sequence. For a
            model without slow path all three are the same.
        by_position: the loss at each position of the sequence, [T].
        tiny_gradients: share of slow gradients below each limit (see `tiny_gradients`).
    """

    sequences: int
    loss: float
    closed: float
    swapped: float
    by_position: list[float]
    tiny_gradients: dict[str, float]

    @property
    def gate_effect(self) -> float:
        """What closing the gates costs, nats; zero for a gate that is closed in function."""
        return self.closed - self.loss

    @property
    def swap_effect(self) -> float:
        """What slow states without information about the sequence cost, nats."""
        return self.swapped - self.loss


def measure(run: Path, config: Config) -> Measured:
    """Measure a finished run, or read what was measured before.

    Raises:
        UserError: no checkpoint, or one that does not fit its data or tokenizer.
    """
    path = run / FILE_NAME
    with contextlib.suppress(OSError, ValueError, TypeError):  # none yet, or a damaged one: it is measured again
        return Measured(**json.loads(path.read_text(encoding="utf-8")))
    model = load_model(run).model
    _, validation = open_data(config)
    device = next(model.parameters()).device
    held_out = HeldOut.read(validation, config, device, min(SEQUENCES, config.validation.max_sequences))
    whole = losses(model, held_out)
    with closed_gates(model):
        closed = losses(model, held_out)
    with swapped_states(model):
        swapped = losses(model, held_out)
    measured = Measured(
        sequences=held_out.sequences,
        loss=whole.double().nanmean().item(),
        closed=closed.double().nanmean().item(),
        swapped=swapped.double().nanmean().item(),
        by_position=torch.nanmean(whole.double(), dim=0).tolist(),
        tiny_gradients=tiny_gradients(model, held_out),
    )
    write_durably(path, (json.dumps(asdict(measured)) + "\n").encode())
    return measured
