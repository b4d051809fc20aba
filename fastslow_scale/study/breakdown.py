"""What breaks the picture x = p_st(y): a generator that falls apart, and one that is about to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fastslow_scale.study.generators import Array, Family, closed_classes, gap
from fastslow_scale.study.slow_fast import EPSILONS, System, distances, order, solve
from fastslow_scale.study.stationary import (
    NotUnique,
    by_integration,
    by_null_space,
    by_trees,
    group_inverse,
    relax,
    total_variation,
)

BRIDGES = tuple(2.0**-k for k in range(4, 13))
"""Strengths of the jumps between two halves of the states, 1/16 ... 1/4096: towards the limit of none."""

WEAK = 1.0 / 1024
"""With this bridge the halves exchange probability more slowly than y moves, at every eps down to 1/512."""

SMALL_EPSILONS = tuple(2.0**-k for k in range(14, 18))
"""1/16384 ... 1/131072: far below the gap that WEAK leaves."""


@dataclass(frozen=True)
class Reducible:
    """A generator whose states fall into several closed classes.

    Attributes:
        classes: the states of each.
        zero_modes: number of eigenvalues that are zero, |lambda| < 1e-12 of the largest.
        refusals: what each of the three ways to p_st says; None where one gives an answer all the same.
        apart: total variation between the ends of two starts, in the first and in the last class.
    """

    classes: list[list[int]]
    zero_modes: int
    refusals: dict[str, str | None]
    apart: float


@dataclass(frozen=True)
class Closing:
    """A gap that closes as the bridge between two halves of the states vanishes.

    Attributes:
        gaps: at one y, per strength in BRIDGES, [B].
        inverses: largest column sum of |Q^#| there, [B].
        errors: largest distance of x(t) from p_st(y(t)) with the bridge WEAK, per eps in EPSILONS, [E].
        small_errors: the same per eps in SMALL_EPSILONS.
        gap_order, inverse_order: exponents of the strength in gaps and inverses.
        error_order, small_error_order: exponents of eps in errors and small_errors; 1 where eps is far below the gap.
    """

    gaps: Array
    inverses: Array
    errors: Array
    small_errors: Array
    gap_order: float
    inverse_order: float
    error_order: float
    small_error_order: float


def examine_reducible(generator: Array) -> Reducible:
    """Ask a generator [n, n] with several closed classes for its stationary distribution."""
    classes, eigenvalues = closed_classes(generator), np.linalg.eigvals(generator)
    slowest = np.sort(-eigenvalues.real)[len(classes)]
    starts = [np.eye(len(generator))[states[0]] for states in (classes[0], classes[-1])]
    ends = [relax(generator, start, 60.0 / slowest) for start in starts]
    ways: dict[str, Callable[[], Array]] = {
        "null space": lambda: by_null_space(generator),
        "trees": lambda: by_trees(generator),
        "integration": lambda: by_integration(generator, starts[0]),
    }
    return Reducible(
        classes=classes,
        zero_modes=int((np.abs(eigenvalues) < 1e-12 * np.abs(eigenvalues).max()).sum()),
        refusals={name: _refusal(way) for name, way in ways.items()},
        apart=float(total_variation(*ends)),
    )


def examine_closing(system: System, y: Array) -> Closing:
    """Weaken the bridge between two halves of the states: the gap and Q^# at `y` [m], then x(t) beside p_st(y(t)).

    x starts at p_st: what distance there is comes from y's motion, not from a long initial layer.
    """
    generators = np.stack([system.family.bridged(strength).generator(y) for strength in BRIDGES])
    gaps, inverses = gap(generators), group_inverse(generators, by_null_space(generators))
    sizes = np.abs(inverses).sum(axis=-2).max(axis=-1)
    weak = System(system.family.bridged(WEAK), system.flow)

    def errors_at(epsilons: tuple[float, ...]) -> Array:
        return np.array([distances(weak, solve(weak, eps, at_rest=True), eps).zeroth for eps in epsilons])

    errors, small_errors = errors_at(EPSILONS), errors_at(SMALL_EPSILONS)
    return Closing(
        gaps=gaps,
        inverses=sizes,
        errors=errors,
        small_errors=small_errors,
        gap_order=order(BRIDGES, gaps),
        inverse_order=order(BRIDGES, sizes),
        error_order=order(EPSILONS, errors),
        small_error_order=order(SMALL_EPSILONS, small_errors),
    )


def trap(family: Family, y: Array) -> tuple[Array, int]:
    """One closed class and states that are left for ever: Q(y) without the jumps out of the first half of the states.

    Returns the generator [n, n] and the number of its closed states. It is reducible, yet p_st is unique; it is zero
    outside the closed class.
    """
    generator, closed = family.generator(y), family.states // 2
    rates = generator * (1.0 - np.eye(family.states))
    rates[closed:, :closed] = 0.0
    return rates - np.diag(rates.sum(axis=0)), closed


def _refusal(way: Callable[[], Array]) -> str | None:
    try:
        way()
    except NotUnique as refusal:
        return str(refusal)
    return None
