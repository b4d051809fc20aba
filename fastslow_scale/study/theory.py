"""What the linear theory claims, checked one by one: the work behind `fastslow theory`. Explained in docs/theory.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fastslow_scale.study import variational
from fastslow_scale.study.breakdown import (
    SMALL_EPSILONS,
    WEAK,
    Closing,
    Reducible,
    examine_closing,
    examine_reducible,
    trap,
)
from fastslow_scale.study.generators import KINDS, Array, Family, Kind, circulation, draw_family, draw_slow
from fastslow_scale.study.slow_fast import (
    Convergence,
    System,
    Trajectory,
    converge,
    distances,
    draw_system,
    solve,
)
from fastslow_scale.study.stationary import (
    by_integration,
    by_null_space,
    by_trees,
    group_inverse,
    movement,
    total_variation,
    two_states,
)

SIZES = (3, 5)
"""Numbers of fast states, for each kind of generator."""

LAYER_EPSILONS = (1 / 4, 1 / 16, 1 / 64, 1 / 256)
"""The paths of the figure that shows the initial layer."""


@dataclass(frozen=True)
class Claim:
    """One row of the table."""

    part: str
    text: str
    measured: str
    expected: str
    ok: bool


@dataclass(frozen=True)
class Stationary:
    """Errors of the linear algebra, each the largest over all generators drawn.

    Attributes:
        three_ways: entries of p_st between null space, trees and integration.
        two_states: entries of p_st (three ways) and Q^# against the closed form.
        group_equations: entries of Q X Q - Q, X Q X - X, Q X - X Q, Q X - (I - p_st 1ᵀ) for X = Q^#.
        movement: entries of dp_st/dy against central differences.
        circulations: `circulation`, by kind.
    """

    three_ways: float
    two_states: float
    group_equations: float
    movement: float
    circulations: dict[Kind, float]


@dataclass(frozen=True)
class Breakdown:
    """The generators that break the picture: see `breakdown`.

    Attributes:
        trapped: total variation between the three ways for a reducible generator with one closed class, largest.
        outside: the probability of the states outside that class.
    """

    reducible: Reducible
    closing: Closing
    trapped: float
    outside: float


@dataclass(frozen=True)
class Theory:
    """All that was measured.

    Attributes:
        seed: of everything that was drawn.
        convergences: one per system.
        layer: eps and total variation to p_st(y(t)) along one path each, with its times, as [steps] each.
        fits: per kind and width, one per restart.
        claims: the rows of the table.
    """

    seed: int
    convergences: list[Convergence]
    layer: dict[float, tuple[Array, Array]]
    fits: dict[Kind, dict[int, list[variational.Fit]]]
    breakdown: Breakdown
    claims: list[Claim]

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(claim.ok for claim in self.claims)


def study_theory(seed: int, progress: Callable[[str], None]) -> Theory:
    """Draw everything from `seed`, measure, judge. `progress` is told what comes next. About a minute on one core."""
    streams = [np.random.default_rng(part) for part in np.random.SeedSequence(seed).spawn(4)]
    progress("stiff systems against the slow manifold")
    systems = [draw_system(draw_family(kind, n, streams[0]), streams[0]) for kind in KINDS for n in SIZES]
    convergences = [converge(system) for system in systems]
    other_solver = compare_solvers(systems[-1])
    layer = {eps: _distance_in_time(systems[-1], solve(systems[-1], eps)) for eps in LAYER_EPSILONS}
    progress("stationary distributions three ways")
    stationary = check_stationary(streams[1])
    progress("phi trained without targets")
    fits = {kind: variational.fits_by_width(draw_family(kind, 5, streams[2]), streams[2]) for kind in KINDS}
    progress("generators that break the picture")
    breakdown = break_it(streams[3])
    claims = [
        *claims_on_convergence(convergences, other_solver),
        *claims_on_stationary(stationary),
        *claims_on_fits(fits),
        *claims_on_breakdown(breakdown),
    ]
    return Theory(seed, convergences, layer, fits, breakdown, claims)


def compare_solvers(system: System, eps: float = 1 / 64) -> float:
    """Relative difference of the distance to the first-order manifold between BDF and Radau."""
    first = [distances(system, solve(system, eps, method=method), eps).first for method in ("Radau", "BDF")]
    return abs(first[1] / first[0] - 1.0)


def check_stationary(rng: np.random.Generator, sizes: tuple[int, ...] = (3, 5, 8), points: int = 3) -> Stationary:
    """The linear algebra at some points y, for each kind and number of states."""
    three_ways, group_equations, moved = [], [], []
    circulations: dict[Kind, float] = {}
    for kind in KINDS:
        flows = []
        for n in sizes:
            family = draw_family(kind, n, rng)
            for y in draw_slow(points, rng):
                generator = family.generator(y)
                p = by_null_space(generator)
                others = np.stack([by_trees(generator), by_integration(generator, np.eye(n)[0])])
                three_ways.append(np.abs(others - p).max())
                inverse = group_inverse(generator, p)
                group_equations.append(group_equation_error(generator, p, inverse))
                moved.append(_movement_error(family, y, movement(inverse, family.derivative(y), p)))
                flows.append(circulation(generator, p))
        circulations[kind] = max(flows)
    closed_form = [two_state_error(*rng.uniform(0.1, 10.0, 2)) for _ in range(5)]
    return Stationary(
        # numpy's max, not Python's: a NaN must come through.
        three_ways=float(np.max(three_ways)),
        two_states=float(np.max(closed_form)),
        group_equations=float(np.max(group_equations)),
        movement=float(np.max(moved)),
        circulations=circulations,
    )


def group_equation_error(generator: Array, stationary: Array, inverse: Array) -> float:
    """Largest entry of the four differences that vanish for X = Q^#: [n, n], [n], [n, n].

    The first three define the group inverse. The fourth, Q X = I - p_st 1ᵀ, ties it to this generator.
    """
    q, x, n = generator, inverse, len(stationary)
    differences = (q @ x @ q - q, x @ q @ x - x, q @ x - x @ q, q @ x - (np.eye(n) - np.outer(stationary, np.ones(n))))
    return float(np.max(np.abs(differences)))


def two_state_error(there: float, back: float) -> float:
    """Largest difference of the three ways to p_st and of Q^# from the closed form."""
    generator, p, inverse = two_states(there, back)
    ways = by_null_space(generator), by_trees(generator), by_integration(generator, np.array([1.0, 0.0]))
    errors = [np.abs(way - p).max() for way in ways] + [np.abs(group_inverse(generator, ways[0]) - inverse).max()]
    return float(np.max(errors))


def break_it(rng: np.random.Generator) -> Breakdown:
    """A family of six states, cut in two, half cut, and nearly cut."""
    system = draw_system(draw_family("non-reversible", 6, rng), rng)
    y = draw_slow(1, rng)[0]
    generator, closed = trap(system.family, y)
    p = by_null_space(generator)
    others = np.stack([by_trees(generator), by_integration(generator, np.full(6, 1 / 6))])
    return Breakdown(
        reducible=examine_reducible(system.family.bridged(0.0).generator(y)),
        closing=examine_closing(system, y),
        trapped=float(total_variation(others, p).max()),
        outside=float(np.abs(p[closed:]).sum()),
    )


def claims_on_convergence(convergences: list[Convergence], other_solver: float) -> list[Claim]:
    """Part a: x(t) and the slow manifold."""
    zeroth, first = [c.zeroth_order for c in convergences], [c.first_order for c in convergences]
    solver_errors, off_simplex = [c.solver_error for c in convergences], [c.off_simplex for c in convergences]
    count = f"{len(convergences)} systems"
    return [
        _claim("a", f"distance of x(t) from p_st(y(t)), exponent of eps in {count}", zeroth, "1 ± 0.05", 0.95, 1.05),
        _claim("a", f"distance from p_st + eps Q^# (dp_st/dy) g, exponent in {count}", first, "2 ± 0.1", 1.9, 2.1),
        _claim("a", "a finer tolerance changes the smallest distance by", solver_errors, "< 1%", 0.0, 0.01, "{:.1e}"),
        _claim("a", "BDF instead of Radau changes a distance by", [other_solver], "< 1%", 0.0, 0.01, "{:.1e}"),
        _claim("a", "x(t) leaves the simplex by at most", off_simplex, "< 1e-8", 0.0, 1e-8, "{:.1e}"),
    ]


def claims_on_stationary(found: Stationary) -> list[Claim]:
    """Part b: p_st and the group inverse."""
    balanced = found.circulations["reversible"]
    flowing = min(largest for kind, largest in found.circulations.items() if kind != "reversible")
    rows = [
        ("p_st by null space, trees, integration: largest difference", found.three_ways, 1e-10),
        ("two states: p_st and Q^# against the closed form", found.two_states, 1e-10),
        ("Q^# in its four equations: largest error", found.group_equations, 1e-10),
        ("dp_st/dy = -Q^# (dQ/dy) p_st against differences", found.movement, 1e-7),
        ("reversible: largest net flow over largest flow", balanced, 1e-12),
    ]
    return [
        *(_claim("b", text, [error], f"< {limit:.0e}", 0.0, limit, "{:.1e}") for text, error, limit in rows),
        _claim("b", "the other kinds: the same", [flowing], "> 1e-2", 1e-2, 1.0, "{:.1e}"),
    ]


def claims_on_fits(fits: dict[Kind, dict[int, list[variational.Fit]]]) -> list[Claim]:
    """Part c: phi_theta learned from |Q phi|^2 alone."""
    claims = []
    for kind, by_width in fits.items():
        widest = max(by_width)
        means = [mean_error(by_width[width]) for width in sorted(by_width)]
        worst = [fit.worst for fit in by_width[widest]]
        text = f"{kind}: worst total variation to p_st on held-out y, width {widest}"
        claims.append(_claim("c", text, worst, "< 1e-2", 0.0, 1e-2, "{:.1e}"))
        falling = all(wider < narrower for narrower, wider in pairwise(means))
        widths = ", ".join(str(width) for width in sorted(by_width))
        measured = " ".join(f"{mean:.1e}" for mean in means)
        claims.append(Claim("c", f"{kind}: mean total variation at widths {widths}", measured, "falling", falling))
    identities = [fit.identity for by_width in fits.values() for runs in by_width.values() for fit in runs]
    text = "phi - p_st = Q^# Q phi at every held-out y: largest error"
    return [*claims, _claim("c", text, identities, "< 1e-10", 0.0, 1e-10, "{:.1e}")]


def claims_on_breakdown(found: Breakdown) -> list[Claim]:
    """Part d: each break must be seen and reported as one."""
    reducible, closing = found.reducible, found.closing
    classes, refused = len(reducible.classes), sum(reason is not None for reason in reducible.refusals.values())
    weak, small = f"bridge {_power(WEAK)}", f"eps {_power(SMALL_EPSILONS[0])} ... {_power(SMALL_EPSILONS[-1])}"
    return [
        _claim(
            "d", "reducible: closed classes, and eigenvalues zero", [classes, reducible.zero_modes], "2", 2, 2, "{}"
        ),
        _claim("d", "reducible: ways to p_st that refuse", [refused], "all 3", 3, 3, "{}"),
        _claim("d", "reducible: distance between the ends of two starts", [reducible.apart], "1", 1 - 1e-8, 1 + 1e-8),
        _claim("d", "one closed class: three ways differ by", [found.trapped], "< 1e-10", 0.0, 1e-10, "{:.1e}"),
        _claim("d", "one closed class: probability outside it", [found.outside], "< 1e-10", 0.0, 1e-10, "{:.1e}"),
        _claim("d", "gap as the bridge between halves weakens: exponent", [closing.gap_order], "1 ± 0.05", 0.95, 1.05),
        _claim("d", "size of Q^# meanwhile: exponent", [closing.inverse_order], "-1 ± 0.05", -1.05, -0.95),
        _claim("d", f"{weak}: exponent in (a) is lost", [closing.error_order], "< 0.5", -0.5, 0.5),
        _claim("d", f"{weak}, {small}: back", [closing.small_error_order], "1 ± 0.1", 0.9, 1.1),
    ]


def mean_error(fits: list[variational.Fit]) -> float:
    """Median over restarts of the mean total variation."""
    return float(np.median([fit.mean for fit in fits]))


def _claim(
    part: str, text: str, values: list[float], expected: str, low: float, high: float, form: str = "{:.4f}"
) -> Claim:
    """Holds if all values lie in [low, high]; a NaN does not."""
    ends = dict.fromkeys(form.format(value) for value in (min(values), max(values)))
    return Claim(part, text, " ... ".join(ends), expected, all(low <= value <= high for value in values))


def _power(size: float) -> str:
    return f"1/{round(1 / size)}"


def _movement_error(family: Family, y: Array, moved: Array, step: float = 1e-5) -> float:
    """Largest entry of dp_st/dy [m, n] minus central differences, whose own error is about step^2 = 1e-10."""
    shifts = step * np.eye(len(y))
    up, down = by_null_space(family.generator(y + shifts)), by_null_space(family.generator(y - shifts))
    return float(np.abs(moved - (up - down) / (2 * step)).max())


def _distance_in_time(system: System, path: Trajectory) -> tuple[Array, Array]:
    return path.time, total_variation(path.x, by_null_space(system.family.generator(path.y)))
