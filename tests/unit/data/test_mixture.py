"""Mixtures: exact quotas against a naive reference, each source's own epochs, and what does not fit together."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from data_pipeline.batches import step_batches
from data_pipeline.errors import UserError
from data_pipeline.mixture import Mixture, MixtureOrder, Reader, Source, sources_of
from data_pipeline.order import SampleOrder
from data_pipeline.stream import TokenDataset
from tests.unit.data.test_order import naive_key, naive_splitmix64

pytestmark = pytest.mark.unit

SHUFFLE = 0x6D69780A


def naive_mixture(weights: list[Fraction], seed: int, blocks: int, block: int) -> list[int]:
    """The source at each position, from the definition: quotas by rounding the cumulative shares, then a shuffle."""
    total = sum(weights)
    labels: list[int] = []
    for number in range(blocks):
        quotas = []
        for source in range(len(weights)):
            low, high = (sum(weights[:source]) / total, sum(weights[: source + 1]) / total)
            counts = [
                (n * block * high + Fraction(1, 2)) // 1 - (n * block * low + Fraction(1, 2)) // 1
                for n in (number, number + 1)
            ]
            quotas.append(int(counts[1] - counts[0]))
        inside = [source for source, quota in enumerate(quotas) for _ in range(quota)]
        key = naive_key(seed, SHUFFLE, number)
        labels += [inside[i] for i in sorted(range(block), key=lambda i: naive_splitmix64(i ^ key))]
    return labels


WEIGHTS = ([1.0, 1.0], [0.7, 0.2, 0.1], [3.0], [1, 2, 3, 5, 7], [0.001, 0.999], [1 / 3, 2 / 3])


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_equals_the_naive_reference_from_wherever_it_starts(weights: list[float]) -> None:
    order = MixtureOrder(weights, seed=9)
    blocks = 3
    expected = naive_mixture([Fraction(str(weight)) for weight in weights], 9, blocks, order.block)
    seen = [0] * len(weights)
    places = []
    for source in expected:
        places.append((source, seen[source]))
        seen[source] += 1
    sources, positions = order(0, len(expected))
    assert list(zip(sources.tolist(), positions.tolist(), strict=True)) == places
    for start, count in ((0, 1), (order.block - 1, 2), (order.block, 5), (2 * order.block - 7, 900), (1234, 0)):
        sources, positions = MixtureOrder(weights, seed=9)(start, count)
        assert list(zip(sources.tolist(), positions.tolist(), strict=True)) == places[start : start + count]
        assert order.counts(start) == [expected[:start].count(n) for n in range(len(weights))]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_no_source_drifts_from_its_share(weights: list[float]) -> None:
    """At the end of every block within one sample; 10^9 blocks later as well."""
    order = MixtureOrder(weights, seed=1)
    exact = [Fraction(str(weight)) for weight in weights]
    before = [0] * len(weights)
    for number in (1, 2, 3, 4, 5, 1000, 10**9):
        counts = order.counts(number * order.block)
        assert sum(counts) == number * order.block
        for count, weight, last in zip(counts, exact, before, strict=True):
            assert abs(count - number * order.block * weight / sum(exact)) <= 1
            assert count >= last
        before = counts


def test_a_rare_source_never_runs_backwards() -> None:
    """Shares of three in ten thousand: in blocks that are too short, rounding would take samples back."""
    order = MixtureOrder([0.0003] * 5 + [1.0], seed=0)
    counts = np.array([order.counts(n * order.block) for n in range(200)])
    assert (np.diff(counts, axis=0) >= 0).all()
    assert order.block == 4096


def test_the_mixture_never_changes_between_versions() -> None:
    sources, positions = MixtureOrder([0.5, 0.3, 0.2], seed=7)(10**12, 8)
    assert sources.tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert positions.tolist() == [
        500000000000,
        300000000000,
        500000000001,
        500000000002,
        500000000003,
        500000000004,
        500000000005,
        500000000006,
    ]


def test_seeds_mix_differently() -> None:
    assert MixtureOrder([1, 1], 0)(0, 100)[0].tolist() != MixtureOrder([1, 1], 1)(0, 100)[0].tolist()


def test_a_share_that_is_too_small_is_refused() -> None:
    with pytest.raises(UserError, match="share of 1e-09 is too small"):
        MixtureOrder([1.0, 1e-9], 0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, write: Callable[..., Path], texts: list[str]) -> list[Path]:
    """Three sources of unequal size, with one tokenizer."""
    root = tmp_path_factory.mktemp("sources")
    parts = {"prose": texts[:250], "code": texts[250:350], "tables": texts[350:]}
    return [write(root / name, part, shard_bytes=5_000, validation_fraction=0.2) for name, part in parts.items()]


def mixed(folders: list[Path], weights: tuple[float, ...] = (0.5, 0.3, 0.2), split: str = "train") -> Mixture:
    return Mixture.open(sources_of((str(f), w, None) for f, w in zip(folders, weights, strict=True)), split)


def test_each_source_goes_through_its_own_epochs_in_its_own_order(folders: list[Path]) -> None:
    mixture, count = mixed(folders), 6000
    sources, ids = Reader(mixture, seed=4).places(0, count)
    rows = np.concatenate([Reader(mixture, seed=4).stored_rows(start, 250) for start in range(0, count, 250)])
    counts = np.bincount(sources)
    for number, folder in enumerate(folders):
        alone = TokenDataset.open(folder)
        own = sources == number
        order = SampleOrder(alone.num_samples, 64, seed=4)(0, counts[number])
        assert counts[number] > 2 * alone.num_samples, "several epochs"
        assert ids[own].tolist() == order.tolist()
        assert rows[own].tolist() == alone.rows(order).tolist()
        assert sorted(order[: alone.num_samples]) == list(range(alone.num_samples))


def test_any_ranks_read_the_same_mixture(folders: list[Path]) -> None:
    mixture = mixed(folders)

    def read(start: int, steps: int, rank: int, ranks: int) -> torch.Tensor:
        reader = step_batches(
            mixture, seed=2, start_sample=start, global_batch_size=12, dp_rank=rank, dp_size=ranks, num_workers=0
        )
        return torch.stack(list(itertools.islice(reader, steps)))

    whole = read(0, 120, 0, 1)
    for start, ranks in ((0, 2), (17, 3), (86, 4)):
        parts = [read(12 * start, 30, rank, ranks) for rank in range(ranks)]
        assert torch.equal(torch.cat(parts, dim=1), whole[start : start + 30])


def test_the_fingerprint_covers_all_sources_and_their_weights(folders: list[Path]) -> None:
    prints = {
        mixed(folders).fingerprint,
        mixed(folders[::-1]).fingerprint,
        mixed(folders[:2], (0.5, 0.3)).fingerprint,
        mixed(folders, (0.5, 0.2, 0.3)).fingerprint,
    }
    assert len(prints) == 4
    assert mixed(folders).fingerprint in prints


def test_validation_takes_the_sources_in_proportion_and_no_row_twice(folders: list[Path]) -> None:
    mixture = mixed(folders, split="validation")
    rows = mixture.rows(range(mixture.num_samples))
    alone = [TokenDataset.open(folder, "validation") for folder in folders]
    everything = [row for data in alone for row in data.rows(range(data.num_samples)).tolist()]
    read = rows.tolist()
    assert all(read.count(row) <= everything.count(row) for row in read)
    counts = MixtureOrder(mixture.weights, 0).counts(mixture.num_samples)
    assert all(count <= data.num_samples for count, data in zip(counts, alone, strict=True))
    after = MixtureOrder(mixture.weights, 0).counts(mixture.num_samples + 1)
    assert any(count > data.num_samples for count, data in zip(after, alone, strict=True)), "one source is used up"


def test_sources_that_do_not_fit_are_refused(
    folders: list[Path], tmp_path: Path, write: Callable[..., Path], texts: list[str]
) -> None:
    longer = write(tmp_path / "longer", texts[:50], seq_length=20)
    with pytest.raises(UserError, match=rf"{folders[0]} has seq_length 16, {longer} has seq_length 20"):
        mixed([folders[0], longer], (1, 1))
    with pytest.raises(UserError, match="two sources named 'prose'"):
        sources_of([(str(folders[0]), 1, None), ("s3://bucket/prose/", 1, None)])
    named = sources_of([(str(folders[0]), 1, None), ("s3://bucket/prose/", 1, "more")])
    assert [source.name for source in named] == ["prose", "more"]


def test_another_tokenizer_is_refused(folders: list[Path]) -> None:
    datasets = [TokenDataset.open(folder) for folder in folders[:2]]
    datasets[1].tokenizer_sha256 = "f" * 64

    class Opened(TokenDataset):
        @classmethod
        def open(cls, path: object, *_: object, **__: object) -> TokenDataset:  # type: ignore[override]
            return datasets[folders.index(Path(str(path)))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_pipeline.mixture.TokenDataset", Opened)
        with pytest.raises(UserError, match=rf"{folders[0]} and {folders[1]} were encoded by different tokenizers"):
            Mixture.open([Source(folder, 1.0, folder.name) for folder in folders[:2]])
