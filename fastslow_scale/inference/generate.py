"""Text from a trained model: prompts in, pieces of text out as they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from data_pipeline.errors import UserError
from data_pipeline.tokenizer import Tokenizer
from fastslow_scale.config import Config
from fastslow_scale.inference.decode import Decoder
from fastslow_scale.inference.load import Loaded
from fastslow_scale.model.model import FastSlowModel

_BROKEN = "\ufffd"
_MOST_BYTES_PENDING = 3  # of a character of four


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Attributes:
        temperature: the logits are divided by it; 0 takes the likeliest token each time.
        top_p: only the likeliest tokens that together reach this share are in the draw (arXiv 1904.09751).
        seed: row i of a batch draws from its own stream, seeded with seed + i, as it would alone.
    """

    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0


def generate(loaded: Loaded, prompts: Sequence[str], max_tokens: int, sampling: Sampling) -> Iterator[list[str]]:
    """Go on from each prompt, up to an end of document or `max_tokens` tokens.

    An empty prompt begins a new document.

    Yields:
        What each row's text grew by, for each step: whole characters, and empty for a row that has ended.

    Raises:
        UserError: the prompt and `max_tokens` do not fit in the context that the model was trained with, or the model
            hears of other texts.
    """
    if loaded.config.model.variant == "shuffled":
        raise UserError("a model of variant shuffled goes on from the slow state of another text: it generates nothing")
    tokenizer = loaded.tokenizer
    ids = [tokenizer.encode(prompt) or [tokenizer.eos_id] for prompt in prompts]
    for row in ids:
        require_fits(len(row), max_tokens, loaded.config)
    streams = [TextStream(tokenizer) for _ in prompts]
    for tokens in generate_ids(loaded.model, ids, max_tokens, tokenizer.eos_id, sampling):
        yield [
            stream.finish() if token is None else stream.add(token)
            for stream, token in zip(streams, tokens, strict=True)
        ]
    yield [stream.finish() for stream in streams]


def require_fits(prompt_tokens: int, max_tokens: int, config: Config) -> None:
    """Positions beyond the trained context are ones that the model has never seen."""
    context = config.train.seq_length
    if prompt_tokens >= context:
        raise UserError(f"the prompt has {prompt_tokens} tokens; the trained context (train.seq_length) is {context}")
    if prompt_tokens + max_tokens > context:
        raise UserError(
            f"a prompt of {prompt_tokens} tokens and --max-tokens {max_tokens} exceed the trained context "
            f"(train.seq_length = {context}); ask for at most {context - prompt_tokens}"
        )


def generate_ids(
    model: FastSlowModel, prompts: Sequence[Sequence[int]], max_tokens: int, eos_id: int, sampling: Sampling
) -> Iterator[list[int | None]]:
    """The next token of each row, None for one that has ended, until all have ended or have `max_tokens`."""
    decoder = Decoder(model, len(prompts), max(map(len, prompts)) + max_tokens - 1)
    streams = [torch.Generator().manual_seed(sampling.seed + row) for row in range(len(prompts))]
    ended = [False] * len(prompts)
    logits = decoder.start(prompts)
    for count in range(1, max_tokens + 1):
        tokens = choose(logits, sampling, streams)
        ended = [over or token == eos_id for over, token in zip(ended, tokens, strict=True)]
        if all(ended):
            return
        yield [None if over else token for over, token in zip(ended, tokens, strict=True)]
        if count < max_tokens:
            logits = decoder.step(tokens)


def choose(logits: torch.Tensor, sampling: Sampling, streams: Sequence[torch.Generator]) -> list[int]:
    """A token for each row of [B, vocab_size], drawn with the row's own stream."""
    if sampling.temperature == 0:
        return [int(token) for token in logits.argmax(-1)]
    p = distribution(logits, sampling.temperature, sampling.top_p)
    cumulative = p.cumsum(-1)
    u = torch.stack([torch.rand(1, generator=stream, dtype=torch.float64) for stream in streams])
    return torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True).squeeze(1).tolist()


def distribution(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Shares of the draw: softmax(logits / temperature), zero outside the smallest set that reaches top_p.

    [B, vocab_size] -> [B, vocab_size] in fp64 on the CPU, so that every device draws alike; rows need not sum to 1.
    """
    logits = logits.double().cpu()
    p = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    likeliest = p.sort(dim=-1, descending=True)
    beyond = likeliest.values.cumsum(-1) - likeliest.values >= top_p
    beyond[:, 0] = False
    return p.masked_fill(beyond.scatter(-1, likeliest.indices, beyond), 0.0)


class TextStream:
    """Turns tokens into text as they come, holding back the bytes of a character that is not yet whole."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        self._sent = 0

    def add(self, token: int) -> str:
        """What the text certainly grows by."""
        self._pending.append(token)
        text = self._tokenizer.decode(self._pending)
        broken = len(text) - len(text.rstrip(_BROKEN))
        return self._send(text, len(text) - min(broken, _MOST_BYTES_PENDING))

    def finish(self) -> str:
        """What was held back: bytes that no further byte will complete."""
        text = self._tokenizer.decode(self._pending)
        return self._send(text, len(text))

    def _send(self, text: str, stop: int) -> str:
        """The pending text up to `stop`; pending tokens are forgotten once all their text is out."""
        piece, self._sent = text[self._sent : stop], stop
        if stop == len(text):
            self._pending, self._sent = [], 0
        return piece
