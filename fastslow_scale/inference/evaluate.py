"""Loss, perplexity and bits per byte of a trained model on held-out text, by source and by position."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from data_pipeline.errors import UserError
from fastslow_scale.inference.evaluation_data import Rows
from fastslow_scale.inference.loaded import Loaded
from fastslow_scale.model.documents import Documents
from fastslow_scale.model.loss import IGNORE
from fastslow_scale.train.batch import inputs_and_labels

BATCH_TOKENS = 1 << 14

OnScore = Callable[["Score"], None]


@dataclass(frozen=True)
class Score:
    """Sums over the tokens that were predicted.

    Attributes:
        nats: their losses at each position of the sequence, [T] in fp64.
        tokens: how many there were at each position, [T].
        num_bytes: of the text that they stand for. An end-of-document mark stands for none; its loss counts.
        sequences: in how many sequences.
    """

    nats: torch.Tensor
    tokens: torch.Tensor
    num_bytes: int
    sequences: int

    @classmethod
    def nothing(cls, seq_length: int) -> Score:
        return cls(torch.zeros(seq_length, dtype=torch.float64), torch.zeros(seq_length, dtype=torch.int64), 0, 0)

    @classmethod
    def sum(cls, scores: Iterable[Score], seq_length: int) -> Score:
        total = cls.nothing(seq_length)
        for score in scores:
            total = total + score
        return total

    def __add__(self, other: Score) -> Score:
        return Score(
            self.nats + other.nats,
            self.tokens + other.tokens,
            self.num_bytes + other.num_bytes,
            self.sequences + other.sequences,
        )

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.sum())

    @property
    def loss(self) -> float:
        """Mean, in nats a token."""
        return (self.nats.sum() / self.tokens.sum()).item()

    @property
    def perplexity(self) -> float:
        """exp(loss): infinite where that is too large a number."""
        return (self.nats.sum() / self.tokens.sum()).exp().item()

    @property
    def bits_per_byte(self) -> float:
        """Unlike the loss it compares models of different vocabularies; nan for end marks alone."""
        return self.nats.sum().item() / (math.log(2) * self.num_bytes) if self.num_bytes else math.nan

    def by_position(self, parts: int) -> list[tuple[int, int, float]]:
        """(first position, last position, mean loss) of `parts` parts of the sequence, as equal as can be.

        nan where a part has no token.
        """
        found, start = [], 0
        for nats, tokens in zip(self.nats.tensor_split(parts), self.tokens.tensor_split(parts), strict=True):
            if len(nats):
                found.append((start, start + len(nats) - 1, (nats.sum() / tokens.sum()).item()))
            start += len(nats)
        return found


@dataclass(frozen=True)
class Evaluation:
    """What was found, by source; a source of which no sequence was read is left out."""

    checkpoint: Path
    location: str
    seq_length: int
    sources: dict[str, Score]

    @property
    def total(self) -> Score:
        return Score.sum(self.sources.values(), self.seq_length)


@torch.no_grad()
def evaluate(loaded: Loaded, rows: Rows, on_score: OnScore = lambda so_far: None) -> Evaluation:
    """Predict every token of the rows, each from those before it in its row.

    `data.reset_at_document` is the run's own: with it a token is predicted from its document alone.

    Args:
        on_score: told after each batch of all that was scored so far.

    Raises:
        UserError: a single row, for a model that hears of another one, or rows without a token to predict.
    """
    model, tokenizer, length = loaded.model, loaded.tokenizer, rows.seq_length
    device = next(model.parameters()).device
    sizes = torch.from_numpy(tokenizer.piece_sizes())
    in_pairs = loaded.config.model.variant == "shuffled"
    if in_pairs and len(rows.source) < 2:
        raise UserError("a model of variant shuffled hears of another sequence: it needs two or more, here is one")
    scores = [Score.nothing(length) for _ in rows.names]
    for numbers in batches(len(rows.source), max(2, BATCH_TOKENS // length), in_pairs):
        tokens, labels = inputs_and_labels(rows.read(numbers), tokenizer.pad_id)
        tokens = tokens.to(device)
        documents = Documents.of_tokens(tokens, tokenizer.eos_id) if loaded.config.data.reset_at_document else None
        nats = model.token_losses(tokens, labels.to(device), documents).double().cpu()
        counted = labels != IGNORE
        num_bytes = sizes[labels.clamp(min=0)] * counted
        source = torch.from_numpy(rows.source[numbers.start : numbers.stop])
        for number in source.unique().tolist():
            own = source == number
            scores[number] += Score(nats[own].sum(0), counted[own].sum(0), int(num_bytes[own].sum()), int(own.sum()))
        on_score(Score.sum(scores, length))
    found = {name: score for name, score in zip(rows.names, scores, strict=True) if score.sequences}
    if not any(score.num_tokens for score in scores):
        raise UserError(f"{rows.location} has no token to predict")
    return Evaluation(loaded.checkpoint, rows.location, length, found)


def batches(count: int, size: int, in_pairs: bool) -> list[range]:
    """0 .. count - 1 in batches of `size` and a smaller last one; `in_pairs`: no batch of one, unless that is all."""
    starts = list(range(0, count, size))
    if in_pairs and len(starts) > 1 and count - starts[-1] == 1:
        starts.pop()
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], count], strict=True)]
