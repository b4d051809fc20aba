"""The statistics of an ablation against scipy, statsmodels, textbook tables and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower
from statsmodels.stats.weightstats import ttost_paired

from data_pipeline.errors import UserError
from fastslow_scale.study.scaling import Point, fit
from fastslow_scale.study.statistics import compare, holm, smallest_effect, spread

pytestmark = pytest.mark.unit

DIFFERENCES = [0.0031, -0.0012, 0.0007, 0.0044, -0.0020]
MARGIN = 0.01


def test_intervals_and_p_values_are_those_of_scipy_and_statsmodels() -> None:
    found = compare(DIFFERENCES, MARGIN)
    oracle = stats.ttest_1samp(DIFFERENCES, 0.0)
    assert found.p_difference == pytest.approx(oracle.pvalue, rel=1e-12)
    for level, interval in ((0.95, found.interval_95), (0.90, found.interval_90)):
        expected = oracle.confidence_interval(level)
        assert interval == pytest.approx((expected.low, expected.high), rel=1e-12)
    p_equivalence, _, _ = ttost_paired(np.array(DIFFERENCES), np.zeros(5), -MARGIN, MARGIN)
    assert found.p_equivalence == pytest.approx(p_equivalence, rel=1e-10)
    # By hand: mean 0.0010, sum of squared deviations 2.99e-5, t(0.975, 4) = 2.776 from the usual table.
    assert found.mean == pytest.approx(0.0010)
    assert found.sd == pytest.approx(math.sqrt(2.99e-5 / 4))
    assert found.interval_95[1] == pytest.approx(0.0010 + 2.776 * math.sqrt(2.99e-5 / 4 / 5), abs=1e-6)


def test_equivalence_at_five_percent_is_the_ninety_percent_interval_inside_the_margin() -> None:
    lot = np.random.default_rng(3)
    for _ in range(300):
        found = compare((lot.normal(lot.uniform(-0.01, 0.01), 0.005, size=5)).tolist(), MARGIN)
        assert (found.p_equivalence < 0.05) == (found.verdict == "equivalent")


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.001, -0.001, 0.002, 0.0, -0.002], "equivalent"),
        ([0.0020, 0.0021, 0.0019, 0.0020, 0.0022], "equivalent"),  # certainly not zero, but small
        ([-0.020, -0.021, -0.019, -0.020, -0.022], "better"),
        ([0.020, 0.021, 0.019, 0.020, 0.022], "worse"),
        ([0.03, -0.02, 0.01, 0.0, -0.03], "undecided"),
        ([0.0, 0.0, 0.0], "equivalent"),
        ([0.02, 0.02], "worse"),
        ([-0.02, -0.02], "better"),
        ([0.001], "undecided"),
    ],
)
def test_the_verdict(differences: list[float], verdict: str) -> None:
    assert compare(differences, MARGIN).verdict == verdict


def test_variants_of_one_function_are_equal_for_certain_and_one_seed_decides_nothing() -> None:
    same = compare([0.0, 0.0, 0.0], MARGIN)
    assert (same.p_difference, same.p_equivalence, same.interval_95) == (1.0, 0.0, (0.0, 0.0))
    single = compare([0.001], MARGIN)
    assert all(math.isnan(value) for value in (single.sd, single.p_difference, single.smallest_effect))


def test_the_smallest_effect_is_the_one_that_statsmodels_finds_with_that_power() -> None:
    for count, sd in ((3, 0.002), (5, 0.004), (20, 1.0)):
        effect = smallest_effect(sd, count)
        assert TTestPower().power(effect / sd, count, 0.05) == pytest.approx(0.8, abs=1e-6)


def test_holm_is_that_of_statsmodels() -> None:
    lot = np.random.default_rng(1)
    for _ in range(50):
        p_values = lot.uniform(0, 0.2, size=6).tolist()
        assert holm(p_values) == pytest.approx(multipletests(p_values, method="holm")[1].tolist(), rel=1e-12)
    corrected = holm([0.01, math.nan, 0.04])
    assert corrected[0] == pytest.approx(0.02)
    assert math.isnan(corrected[1])
    assert corrected[2] == pytest.approx(0.04)


@pytest.mark.parametrize("count", [3, 5])
def test_error_rates_by_simulation(count: int) -> None:
    """A true difference of the margin: 'equivalent' in at most 5.5% of 10,000. None: 'better' or 'worse' likewise."""
    lot = np.random.default_rng(7)
    noise = lot.normal(0, 0.004, size=(10_000, count))
    for truth in (MARGIN, -MARGIN):
        wrong = sum(compare(row, MARGIN).verdict == "equivalent" for row in noise + truth)
        assert wrong / 10_000 <= 0.055
    verdicts = [compare(row, 1e-9).verdict for row in noise]
    assert sum(verdict in ("better", "worse") for verdict in verdicts) / 10_000 <= 0.055
    assert sum(verdict in ("better", "worse") for verdict in verdicts) / 10_000 >= 0.04, "the test has its size"
    verdicts = [compare(row, MARGIN).verdict for row in noise]
    assert sum(verdict in ("better", "worse") for verdict in verdicts) / 10_000 <= 0.055


def test_spread() -> None:
    assert spread([1.0, 2.0, 4.0]) == pytest.approx(math.sqrt(7 / 3))
    assert math.isnan(spread([1.0]))


def points(noise: float = 0.0) -> list[Point]:
    lot = np.random.default_rng(2)
    return [
        Point("s", tokens, size, 0.01 - 0.004 * math.log10(tokens / 1e6) + 0.002 * math.log10(size / 1e6) + e)
        for tokens in (500_000, 10_000_000)
        for size in (1_400_000, 5_000_000)
        for e in lot.normal(0, noise, size=3)
    ]


def test_a_fit_over_scales_finds_what_was_put_in_and_its_interval_is_that_of_statsmodels() -> None:
    from statsmodels.regression.linear_model import OLS

    exact = fit(points())
    assert [term.value for term in exact.terms] == pytest.approx([0.01, -0.004, 0.002])
    noisy = points(noise=0.001)
    found = fit(noisy)
    design = [[1, math.log10(p.tokens / 1e6), math.log10(p.parameters / 1e6)] for p in noisy]
    oracle = OLS([p.difference for p in noisy], design).fit()
    for term, low_high in zip(found.terms, oracle.conf_int(), strict=True):
        assert term.interval_95 == pytest.approx(tuple(low_high), rel=1e-9)
    value, interval = found.predict(1e8, 1e8)
    predicted = oracle.get_prediction([[1, 2, 2]])
    assert value == pytest.approx(predicted.predicted_mean[0])
    assert interval == pytest.approx(tuple(predicted.conf_int()[0]))


def test_a_fit_that_the_studies_do_not_determine_is_refused() -> None:
    one_scale = [Point("s", 500_000, 1_400_000, d) for d in (0.001, 0.002, 0.003)]
    with pytest.raises(UserError, match="one scale"):
        fit(one_scale)
    in_step = [Point("s", scale, scale, 0.001 * k) for k, scale in enumerate((10**6, 10**7, 10**8, 10**9))]
    with pytest.raises(UserError, match="do not determine"):
        fit(in_step)
    only_tokens = [Point("s", tokens, 10**6, 0.001) for tokens in (10**6, 10**7, 10**8)]
    assert [term.name for term in fit(only_tokens).terms] == ["at 1M tokens and 1M parameters", "per tenfold tokens"]
