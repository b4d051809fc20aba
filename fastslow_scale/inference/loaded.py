"""What there is to sample from, to evaluate and to study."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data_pipeline.tokenizer import Tokenizer
from fastslow_scale.config import Config
from fastslow_scale.model.model import FastSlowModel


@dataclass(frozen=True)
class Loaded:
    """A model with what it takes to use it.

    Attributes:
        model: in fp32, the precision of the saved weights.
        config: the run's own, but for `parallel`, which is one process here.
        checkpoint: the folder it came from, a checkpoint's or an export's.
        notes: what a user should know, such as a damaged checkpoint that was passed over.
    """

    model: FastSlowModel
    tokenizer: Tokenizer
    config: Config
    checkpoint: Path
    notes: list[str]
