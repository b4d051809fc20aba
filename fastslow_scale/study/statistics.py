"""From paired losses to a verdict: intervals, an equivalence test, Holm's correction, and what could have been found.

Runs with the same seed start from the same fast weights and see the same batches, so what is compared is the
difference d_i of their final validation losses, one per seed i of n, in nats. With their mean m, their standard
deviation s (n - 1 in the denominator) and the standard error e = s / sqrt(n):

    interval        m -+ t(1 - a/2) e
    p difference    2 P(T > |m| / e)                                    H0: the true difference is zero
    p equivalence   max(P(T > (m + margin)/e), P(T < (m - margin)/e))   H0: it lies outside (-margin, margin)

T and t: Student's distribution with n - 1 degrees of freedom and its quantiles. The last line is two one-sided tests
(Schuirmann, J. Pharmacokin. Biopharm. 15, 657, 1987); p equivalence is below 5% exactly if the 90% interval lies inside
the margin.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import optimize, special, stats

Verdict = Literal["equivalent", "better", "worse", "undecided"]
Interval = tuple[float, float]

POWER = 0.8
"""How surely `smallest_effect` would have been found."""


@dataclass(frozen=True)
class Comparison:
    """A variant against its baseline. Differences are variant minus baseline: below zero, the variant is better.

    Attributes:
        mean, sd: of the differences, nats; sd is nan for a single seed, and so is all that rests on it.
        interval_95, interval_90: confidence intervals for the true difference.
        p_difference: two-sided, of no difference.
        p_equivalence: of a difference as large as the margin.
        smallest_effect: the true difference that this many seeds with this noise find significant 4 times in 5.
        verdict: `equivalent` if the 90% interval lies inside the margin; else `better` or `worse` if the 95% interval
            excludes zero; else `undecided`.
    """

    differences: tuple[float, ...]
    margin: float
    mean: float
    sd: float
    interval_95: Interval
    interval_90: Interval
    p_difference: float
    p_equivalence: float
    smallest_effect: float
    verdict: Verdict


def compare(differences: Sequence[float], margin: float) -> Comparison:
    """Judge paired differences [n], n >= 1, against a margin that was chosen before the runs (nats, above zero)."""
    values = np.asarray(differences, dtype=np.float64)
    count, mean = len(values), float(values.mean())
    sd = float(values.std(ddof=1)) if count > 1 else math.nan
    error = sd / math.sqrt(count)
    if error > 0:
        freedom = count - 1
        p_difference = 2 * float(special.stdtr(freedom, -abs(mean) / error))
        p_equivalence = float(special.stdtr(freedom, max(-(mean + margin), mean - margin) / error))
        reach_95, reach_90 = (float(special.stdtrit(freedom, 1 - a / 2)) * error for a in (0.05, 0.10))
    elif error == 0:  # every seed says the same, as for variants that compute the same function
        p_difference, p_equivalence = float(mean == 0), float(abs(mean) >= margin)
        reach_95 = reach_90 = 0.0
    else:
        p_difference = p_equivalence = reach_95 = reach_90 = math.nan
    interval_95, interval_90 = ((mean - reach, mean + reach) for reach in (reach_95, reach_90))
    return Comparison(
        differences=tuple(float(value) for value in values),
        margin=margin,
        mean=mean,
        sd=sd,
        interval_95=interval_95,
        interval_90=interval_90,
        p_difference=p_difference,
        p_equivalence=p_equivalence,
        smallest_effect=smallest_effect(sd, count),
        verdict=_verdict(interval_95, interval_90, margin),
    )


def _verdict(interval_95: Interval, interval_90: Interval, margin: float) -> Verdict:
    if -margin < interval_90[0] and interval_90[1] < margin:
        return "equivalent"
    if interval_95[1] < 0:
        return "better"
    if interval_95[0] > 0:
        return "worse"
    return "undecided"


def smallest_effect(sd: float, count: int) -> float:
    """The true difference that a two-sided paired t-test at 5% finds with probability `POWER`; nan for one seed.

    With a true difference d the statistic follows the noncentral t with parameter d sqrt(n) / sd.
    """
    if not (count > 1 and sd >= 0):
        return math.nan
    return _detectable_shift(count - 1) * sd / math.sqrt(count)


@functools.cache
def _detectable_shift(freedom: int) -> float:
    limit = special.stdtrit(freedom, 0.975)

    def shortfall(shift: float) -> float:
        other_tail = np.nan_to_num(stats.nct.cdf(-limit, freedom, shift))  # scipy: nan where it is next to nothing
        return float(stats.nct.sf(limit, freedom, shift) + other_tail) - POWER

    return float(optimize.brentq(shortfall, 0.0, 4 * limit + 10))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for being several (Holm, Scand. J. Statist. 6, 65, 1979), in the order given; nan stays nan.

    The k-th smallest of m is multiplied by m - k + 1, and none may fall below a smaller one's.
    """
    order = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    corrected, largest = [math.nan] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def spread(values: Sequence[float]) -> float:
    """Standard deviation (n - 1 in the denominator); nan for fewer than two."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
