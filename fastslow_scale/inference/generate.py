"""Text from a trained model: prompts in, pieces of text out as they come."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from data_pipeline.errors import UserError
from data_pipeline.tokenizer import Tokenizer
from fastslow_scale.config import Config
from fastslow_scale.inference.decode import Clock, Decoder
from fastslow_scale.inference.loaded import Loaded
from fastslow_scale.inference.stop import StopFilter
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
        top_k: only so many of the likeliest tokens are in the draw, None: all; `top_p` then counts their shares of it.
    """

    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0
    top_k: int | None = None


@dataclass
class Stats:
    """What generating took, filled in as it goes on.

    Attributes:
        clock: what all times are measured with.
        prompt_seconds: for the prompts, up to the first token of each row.
        steps: further steps, each with a token of every row.
        step_seconds: for all of these, choosing the tokens included.
        exchange_seconds: the part of it that the exchanges took: the slow path, and what ties it to the fast one.
        slow_steps: in how many of the steps the slow path ran.
    """

    clock: Clock
    prompt_seconds: float = 0.0
    steps: int = 0
    step_seconds: float = 0.0
    exchange_seconds: float = 0.0
    slow_steps: int = 0

    @classmethod
    def of(cls, model: FastSlowModel) -> Stats:
        """With a clock that waits for what the model's device is still busy with."""
        device = model.norm.weight.device

        def clock() -> float:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter()

        return cls(clock)

    def lines(self, rows: int) -> list[str]:
        """For people."""
        shown = [f"prompt: {1000 * self.prompt_seconds:.1f} ms"]
        if self.steps:
            each = f"{1000 * self.step_seconds / self.steps:.2f} ms"
            shown.append(f"{each} a token" if rows == 1 else f"{each} a step of {rows} tokens")
        if self.exchange_seconds:
            share = f"{self.exchange_seconds / self.step_seconds:.1%} of this time"
            shown.append(f"exchanges: {share}; the slow path ran in {self.slow_steps} of {self.steps} steps")
        return shown


def generate(
    loaded: Loaded,
    prompts: Sequence[str],
    max_tokens: int,
    sampling: Sampling,
    stops: Sequence[str] = (),
    beyond_context: bool = False,
    stats: Stats | None = None,
) -> Iterator[list[str]]:
    """Go on from each prompt, up to an end of document, a stop string or `max_tokens` tokens.

    An empty prompt begins a new document.

    Args:
        stops: a row's text ends before the first of these that it generates.
        beyond_context: go on to positions that the model was never trained on.
        stats: is filled in.

    Yields:
        What each row's text grew by, for each step: whole characters, and empty for a row that has ended.

    Raises:
        UserError: the prompt and `max_tokens` do not fit in the context that the model was trained with, a stop string
            is empty, or the model hears of other texts.
    """
    if loaded.config.model.variant == "shuffled":
        raise UserError("a model of variant shuffled goes on from the slow state of another text: it generates nothing")
    tokenizer = loaded.tokenizer
    ids = [tokenizer.encode(prompt) or [tokenizer.eos_id] for prompt in prompts]
    for row in ids if not beyond_context else []:
        require_fits(len(row), max_tokens, loaded.config)
    rows = [(TextStream(tokenizer), StopFilter(stops)) for _ in prompts]
    for tokens in generate_ids(loaded.model, ids, max_tokens, tokenizer.eos_id, sampling, stats):
        yield [
            until_stop.add(stream.finish() if token is None else stream.add(token))
            for (stream, until_stop), token in zip(rows, tokens, strict=True)
        ]
        if all(token is None or until_stop.stopped for (_, until_stop), token in zip(rows, tokens, strict=True)):
            break
    yield [until_stop.add(stream.finish()) + until_stop.finish() for stream, until_stop in rows]


def require_fits(prompt_tokens: int, max_tokens: int, config: Config) -> None:
    """Positions beyond the trained context are ones that the model has never seen."""
    context = config.train.seq_length
    if prompt_tokens >= context:
        raise UserError(
            f"the prompt has {prompt_tokens} tokens; the trained context (train.seq_length) is {context}: "
            "shorten it, or give --beyond-context"
        )
    if prompt_tokens + max_tokens > context:
        raise UserError(
            f"a prompt of {prompt_tokens} tokens and --max-tokens {max_tokens} exceed the trained context "
            f"(train.seq_length = {context}): ask for at most {context - prompt_tokens}, or give --beyond-context"
        )


def generate_ids(
    model: FastSlowModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    eos_id: int,
    sampling: Sampling,
    stats: Stats | None = None,
) -> Iterator[list[int | None]]:
    """The next token of each row, None for one that has ended, until all have ended or have `max_tokens`."""
    stats = stats or Stats(time.perf_counter)
    before = stats.clock()
    decoder = Decoder(model, len(prompts), max(map(len, prompts)) + max_tokens - 1, stats.clock)
    streams = [torch.Generator().manual_seed(sampling.seed + row) for row in range(len(prompts))]
    ended = [False] * len(prompts)
    tokens = choose(decoder.start(prompts), sampling, streams)
    stats.prompt_seconds = stats.clock() - before
    for_prompts = decoder.exchange_seconds
    for count in range(1, max_tokens + 1):
        ended = [over or token == eos_id for over, token in zip(ended, tokens, strict=True)]
        if all(ended):
            return
        yield [None if over else token for over, token in zip(ended, tokens, strict=True)]
        if count == max_tokens:
            return
        before = stats.clock()
        tokens = choose(decoder.step(tokens), sampling, streams)
        stats.step_seconds += stats.clock() - before
        stats.steps += 1
        stats.exchange_seconds, stats.slow_steps = decoder.exchange_seconds - for_prompts, decoder.slow_steps


def choose(logits: torch.Tensor, sampling: Sampling, streams: Sequence[torch.Generator]) -> list[int]:
    """A token for each row of [B, vocab_size], drawn with the row's own stream."""
    if sampling.temperature == 0:
        return [int(token) for token in logits.argmax(-1)]
    p = distribution(logits, sampling.temperature, sampling.top_p, sampling.top_k)
    cumulative = p.cumsum(-1)
    u = torch.stack([torch.rand(1, generator=stream, dtype=torch.float64) for stream in streams])
    return torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True).squeeze(1).tolist()


def distribution(logits: torch.Tensor, temperature: float, top_p: float, top_k: int | None = None) -> torch.Tensor:
    """Shares of the draw: softmax(logits / temperature), zero outside the smallest set that reaches top_p.

    With top_k only the k likeliest tokens are there at all, of equal ones those with the smaller ids.

    [B, vocab_size] -> [B, vocab_size] in fp64 on the CPU, so that every device draws alike; rows need not sum to 1.
    """
    logits = logits.double().cpu()
    p = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    likeliest = p.sort(dim=-1, descending=True, stable=True)
    shares = likeliest.values if top_k is None else likeliest.values / likeliest.values[:, :top_k].sum(-1, keepdim=True)
    beyond = shares.cumsum(-1) - shares >= top_p
    beyond[:, 0] = False
    if top_k is not None:
        beyond[:, top_k:] = True
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
