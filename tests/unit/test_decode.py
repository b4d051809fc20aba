"""Decoding on caches against the full forward, the float64 reference, and what sampling promises."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from fastslow_scale.config import Config
from fastslow_scale.inference.decode import Decoder
from fastslow_scale.inference.generate import Sampling, choose, distribution, generate_ids
from fastslow_scale.model.model import FastSlowModel, build_model
from fastslow_scale.parallel.mesh import Mesh, single_process_mesh
from tests import reference
from tests.configs import small_config

pytestmark = pytest.mark.unit

SHAPES = {
    "base": small_config(),
    "one exchange at the end": small_config(slow={"exchange_after": [3]}),
    "three exchanges": small_config(slow={"exchange_after": [1, 2, 3], "pool_size": 3}),
    "blocks of two": small_config(slow={"pool_size": 2}),
    "window": small_config(model={"attention_window": 3}),
    "window of a block and one": small_config(model={"attention_window": 5}),
    "window of one": small_config(model={"attention_window": 1}),
    "window beyond the text": small_config(model={"attention_window": 64}),
    "no grouping": small_config(model={"num_key_value_heads": 4}),
    "one key-value head": small_config(model={"num_key_value_heads": 1}),
    "narrow slow path": small_config(slow={"hidden_size": 8, "intermediate_size": 10, "num_key_value_heads": 1}),
    "no slow layers": small_config(slow={"num_layers": 0}),
    "two slow layers": small_config(slow={"num_layers": 2, "initializer_range": "fan_in"}),
    "tied embeddings": small_config(model={"tie_word_embeddings": True}),
    "dense": small_config(model={"variant": "dense"}),
}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return single_process_mesh()


def lively_model(config: Config, mesh: Mesh) -> FastSlowModel:
    """In float64, with gates of order one and wide weights: no part is too faint to be missed."""
    model = build_model(config, mesh, torch.float64)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("gate"):
                p.copy_(torch.randn(p.shape, generator=generator))
            elif p.ndim == 2:
                p.mul_(10)
    return model


def text_of(config: Config, length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.model.vocab_size, (length,), generator=generator).tolist()


def full_forward(model: FastSlowModel, text: Sequence[int]) -> torch.Tensor:
    """The logits after each prefix, each from a forward of its own: [T, vocab_size]."""
    with torch.no_grad():
        return torch.stack([model.logits(torch.tensor([text[:n]]))[0, -1] for n in range(1, len(text) + 1)])


def decoded(model: FastSlowModel, text: Sequence[int], prompt: int) -> torch.Tensor:
    """The logits after the first `prompt` tokens and after each token from there on: [T - prompt + 1, vocab_size]."""
    decoder = Decoder(model, 1, len(text))
    rows = [decoder.start([text[:prompt]])[0]]
    rows += [decoder.step([token])[0] for token in text[prompt:]]
    return torch.stack(rows)


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_decoding_equals_the_full_forward_at_every_position(config: Config, mesh: Mesh) -> None:
    model, size = lively_model(config, mesh), config.slow.pool_size
    text = text_of(config, 4 * size + 3)
    expected = full_forward(model, text)
    for prompt in sorted({1, size - 1, size, size + 1, 2 * size + 1, 4 * size, len(text)}):
        torch.testing.assert_close(decoded(model, text, prompt), expected[prompt - 1 :], rtol=0, atol=1e-10)


def test_every_length_of_prompt(mesh: Mesh) -> None:
    config = small_config(model={"attention_window": 6})
    model = lively_model(config, mesh)
    text = text_of(config, 4 * config.slow.pool_size + 3)
    expected = full_forward(model, text)
    for prompt in range(1, len(text) + 1):
        torch.testing.assert_close(decoded(model, text, prompt), expected[prompt - 1 :], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["base", "window", "window of a block and one"])
def test_beyond_the_trained_context_decoding_still_equals_the_full_forward(name: str, mesh: Mesh) -> None:
    config = SHAPES[name]
    model, context = lively_model(config, mesh), config.train.seq_length
    text = text_of(config, 3 * context + 1)
    expected = full_forward(model, text)
    for prompt in (1, context - 1, context, context + 1, 2 * context + 3):
        torch.testing.assert_close(decoded(model, text, prompt), expected[prompt - 1 :], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["base", "window", "two slow layers"])
def test_decoding_equals_the_reference(name: str, mesh: Mesh) -> None:
    config = SHAPES[name]
    model = lively_model(config, mesh)
    text = text_of(config, 4 * config.slow.pool_size + 3)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    expected = reference.logits(weights, config, torch.tensor([text]))[0]
    torch.testing.assert_close(decoded(model, text, 1), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["base", "three exchanges", "window", "two slow layers", "dense"])
def test_each_row_of_unequal_prompts_is_what_it_is_alone(name: str, mesh: Mesh) -> None:
    config = SHAPES[name]
    model, size = lively_model(config, mesh), config.slow.pool_size
    prompts = [1, size - 1, size, size + 1, 3 * size + 2, 2 * size]
    steps = 2 * size + 1
    texts = [text_of(config, prompt + steps, seed=row) for row, prompt in enumerate(prompts)]
    decoder = Decoder(model, len(texts), max(map(len, texts)))
    logits = [decoder.start([text[:prompt] for text, prompt in zip(texts, prompts, strict=True)])]
    for step in range(steps):
        logits.append(decoder.step([text[prompt + step] for text, prompt in zip(texts, prompts, strict=True)]))
    for row, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        expected = full_forward(model, text)[prompt - 1 :]
        torch.testing.assert_close(torch.stack([step[row] for step in logits]), expected, rtol=0, atol=1e-10)


def count_blocks(model: FastSlowModel) -> list[list[int]]:
    """For each exchange the blocks of each run of its slow path, over all rows; filled as the model runs."""
    runs: list[list[int]] = [[] for _ in model.exchanges]
    for exchange, counts in zip(model.exchanges, runs, strict=True):
        exchange.pool_proj.register_forward_hook(
            lambda module, inputs, output, counts=counts: counts.append(output.shape[0] * output.shape[1])
        )
    return runs


def test_the_slow_path_runs_once_per_block(mesh: Mesh) -> None:
    config = small_config()
    model, size = lively_model(config, mesh), config.slow.pool_size
    runs = count_blocks(model)
    text = text_of(config, 4 * size + 3)
    decoder = Decoder(model, 1, len(text))
    decoder.start([text[:1]])
    seen = []
    for token in text[1:]:
        decoder.step([token])
        seen.append(len(runs[0]))
    assert seen == [n // size for n in range(2, len(text) + 1)]
    assert runs == [[1, 1, 1, 1]] * 2


def test_the_slow_path_runs_for_the_rows_whose_block_ends_and_for_no_other(mesh: Mesh) -> None:
    config = small_config()
    model, size = lively_model(config, mesh), config.slow.pool_size
    runs = count_blocks(model)
    decoder = Decoder(model, 3, 5 * size)
    decoder.start([text_of(config, n) for n in (2 * size + 1, size - 1, 1)])
    assert runs == [[2 * 3]] * 2
    for _ in range(size):
        decoder.step([1, 2, 3])
    assert runs == [[6, 1, 2]] * 2


def test_the_cache_of_a_window_is_no_longer_than_the_window(mesh: Mesh) -> None:
    config = small_config(model={"attention_window": 3})
    model = lively_model(config, mesh)
    decoder = Decoder(model, 2, 40)
    decoder.start([text_of(config, 9), text_of(config, 2)])
    for _ in range(5):
        decoder.step([1, 2])
    shapes = {cache.keys.shape for cache in decoder._fast} | {cache.values.shape for cache in decoder._fast}
    assert shapes == {(2, 2, 3, 4)}


def softmax(logits: list[float], temperature: float) -> list[float]:
    weights = [math.exp(z / temperature) for z in logits]
    return [w / sum(weights) for w in weights]


def nucleus(shares: list[float], top_p: float) -> list[float]:
    """Zero outside the smallest set of likeliest tokens that reaches top_p."""
    kept, mass = set(), 0.0
    for token in sorted(range(len(shares)), key=lambda token: -shares[token]):
        if kept and mass >= top_p:
            break
        kept.add(token)
        mass += shares[token]
    return [share if token in kept else 0.0 for token, share in enumerate(shares)]


LOGITS = [0.3, -1.0, 2.0, 1.1, -3.0, 1.9, 0.0]


@pytest.mark.parametrize("temperature", [0.2, 0.8, 1.0, 3.0])
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.6, 0.95, 1.0])
def test_the_distribution_is_the_computed_one(temperature: float, top_p: float) -> None:
    expected = nucleus(softmax(LOGITS, temperature), top_p)
    shifted = torch.tensor([LOGITS, [z + 700 for z in reversed(LOGITS)]])
    rows = distribution(shifted, temperature, top_p).tolist()
    assert rows[0] == pytest.approx(expected, rel=1e-6)
    assert rows[1] == pytest.approx(expected[::-1], rel=1e-3)  # the shift costs fp32 digits


@pytest.mark.parametrize("top_k", [1, 2, 4, 7, 100])
@pytest.mark.parametrize("top_p", [0.0, 0.6, 0.8, 1.0])
def test_the_distribution_of_the_likeliest_few(top_k: int, top_p: float) -> None:
    shares = softmax(LOGITS, 0.8)
    kept = sorted(range(len(LOGITS)), key=lambda token: -LOGITS[token])[:top_k]
    mass = sum(shares[token] for token in kept)
    expected = nucleus([share / mass if token in kept else 0.0 for token, share in enumerate(shares)], top_p)
    both = distribution(torch.tensor([LOGITS, LOGITS[::-1]], dtype=torch.float64), 0.8, top_p, top_k)
    for row, wanted in zip(both, (expected, expected[::-1]), strict=True):
        assert (row / row.sum()).tolist() == pytest.approx([each / sum(expected) for each in wanted], rel=1e-12)


def test_of_equal_tokens_no_more_than_k_are_kept() -> None:
    assert distribution(torch.zeros(1, 5), 1.0, 1.0, 2).tolist() == [[0.2, 0.2, 0, 0, 0]]


def test_tokens_are_drawn_from_the_likeliest_few_as_often_as_the_distribution_says() -> None:
    draws, stream = 20_000, torch.Generator().manual_seed(0)
    sampling = Sampling(temperature=0.8, top_p=1.0, top_k=3)
    tokens = choose(torch.tensor([LOGITS]).expand(draws, -1), sampling, [stream] * draws)
    shares = [share if token in (2, 5, 3) else 0.0 for token, share in enumerate(softmax(LOGITS, 0.8))]
    for token, share in enumerate(shares):
        share /= sum(shares)
        assert abs(tokens.count(token) / draws - share) <= 4 * math.sqrt(share * (1 - share) / draws), token


@pytest.mark.parametrize("top_p", [0.6, 1.0])
def test_tokens_are_drawn_as_often_as_the_distribution_says(top_p: float) -> None:
    draws = 20_000
    expected = nucleus(softmax(LOGITS, 0.8), top_p)
    expected = [share / sum(expected) for share in expected]
    stream = torch.Generator().manual_seed(0)
    tokens = choose(torch.tensor([LOGITS]).expand(draws, -1), Sampling(0.8, top_p), [stream] * draws)
    for token, share in enumerate(expected):
        deviation = math.sqrt(share * (1 - share) / draws)
        assert abs(tokens.count(token) / draws - share) <= 4 * deviation, token


def test_temperature_zero_and_an_empty_nucleus_take_the_likeliest() -> None:
    logits = torch.tensor([LOGITS, LOGITS[::-1]])
    streams = [torch.Generator().manual_seed(row) for row in range(2)]
    assert choose(logits, Sampling(temperature=0), streams) == [2, 4]
    assert choose(logits, Sampling(temperature=5, top_p=0), streams) == [2, 4]
    assert choose(logits, Sampling(temperature=1e-300), streams) == [2, 4]
    for _ in range(50):
        assert choose(logits, Sampling(temperature=5, top_p=1, top_k=1), streams) == [2, 4]


def ids_of(model: FastSlowModel, prompts: list[list[int]], eos_id: int, sampling: Sampling) -> list[list[int]]:
    steps = list(generate_ids(model, prompts, 12, eos_id, sampling))
    return [[token for token in row if token is not None] for row in zip(*steps, strict=True)]


NEVER = -1


def test_greedy_tokens_are_the_likeliest_of_the_full_forward(mesh: Mesh) -> None:
    config = small_config()
    model, prompt = lively_model(config, mesh), text_of(config, 6)
    text = list(prompt)
    for _ in range(12):
        text.append(int(full_forward(model, text)[-1].argmax()))
    assert ids_of(model, [prompt], NEVER, Sampling(temperature=0)) == [text[6:]]


def test_the_seed_decides_and_each_row_has_its_own(mesh: Mesh) -> None:
    config = small_config()
    model = lively_model(config, mesh)
    prompts = [text_of(config, 6), text_of(config, 2), text_of(config, 6)]
    warm = Sampling(temperature=1.5, top_p=1.0, seed=7)
    rows = ids_of(model, prompts, NEVER, warm)
    assert rows == ids_of(model, prompts, NEVER, warm)
    assert rows[0] != rows[2], "equal prompts, other draws"
    assert rows != ids_of(model, prompts, NEVER, Sampling(temperature=1.5, top_p=1.0, seed=8))
    for row, prompt in enumerate(prompts):
        assert ids_of(model, [prompt], NEVER, Sampling(temperature=1.5, top_p=1.0, seed=7 + row)) == [rows[row]]


def test_a_row_ends_at_the_end_of_its_document_and_the_others_go_on(mesh: Mesh) -> None:
    config = small_config()
    model = lively_model(config, mesh)
    prompts = [text_of(config, 5, seed=row) for row in range(3)]
    endless = ids_of(model, prompts, NEVER, Sampling(temperature=1.5, top_p=1.0))
    eos = endless[1][3]
    expected = [row[: row.index(eos)] if eos in row else row for row in endless]
    assert len(expected[1]) <= 3 and max(map(len, expected)) > len(expected[1])
    assert ids_of(model, prompts, eos, Sampling(temperature=1.5, top_p=1.0)) == expected
    alone = list(generate_ids(model, prompts[:1], 12, endless[0][0], Sampling(temperature=1.5, top_p=1.0)))
    assert alone == []
