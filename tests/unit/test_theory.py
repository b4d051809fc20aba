"""The theory's numbers against closed forms, finite differences and other ways to the same quantity."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.integrate
import scipy.linalg
from rich.console import Console
from typer.testing import CliRunner

from fastslow_scale.study import theory, theory_report, variational
from fastslow_scale.study.breakdown import Closing, examine_closing, examine_reducible, trap
from fastslow_scale.study.generators import (
    GAP,
    KINDS,
    RADIUS,
    Array,
    Kind,
    circulation,
    closed_classes,
    draw_family,
    draw_slow,
    gap,
)
from fastslow_scale.study.slow_fast import (
    EPSILONS,
    Convergence,
    converge,
    distances,
    draw_system,
    order,
    slow_manifold,
    solve,
)
from fastslow_scale.study.stationary import (
    NotUnique,
    by_integration,
    by_null_space,
    by_trees,
    group_inverse,
    movement,
    relax,
    total_variation,
    two_states,
)
from tests.commands import fastslow, refused

pytestmark = pytest.mark.unit


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def generators(kind: Kind, states: int, count: int = 3) -> list[Array]:
    draws = rng(states)
    family = draw_family(kind, states, draws)
    return [family.generator(y) for y in draw_slow(count, draws)]


def differences(function, point: Array, step: float = 1e-5) -> Array:  # type: ignore[no-untyped-def]
    """Central differences of `function` by each entry of `point`: [entries, *value]."""
    shifts = step * np.eye(len(point))
    return np.stack([(function(point + shift) - function(point - shift)) / (2 * step) for shift in shifts])


# Generators


@pytest.mark.parametrize("kind", KINDS)
def test_generators_are_what_they_are_called(kind: Kind) -> None:
    draws = rng(1)
    family = draw_family(kind, 5, draws)
    y = draw_slow(200, draws)
    assert (np.hypot(*y.T) <= RADIUS).all()
    many = family.generator(y)
    off_diagonal = many[:, ~np.eye(5, dtype=bool)]
    assert (off_diagonal >= 0).all()
    assert np.abs(many.sum(axis=1)).max() < 1e-12, "columns sum to zero"
    assert gap(many).min() > 0.99 * GAP
    assert closed_classes(many[0]) == [[0, 1, 2, 3, 4]]
    flows = [circulation(one, by_null_space(one)) for one in many]
    if kind == "reversible":
        assert max(flows) < 1e-12
    else:
        assert max(flows) > 0.05
    if kind == "one-way ring":
        assert (off_diagonal > 0).sum(axis=1).max() == 5, "one way out of each state"
        assert np.abs(np.linalg.eigvals(many[0]).imag).max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_rates_equal_differences(kind: Kind) -> None:
    draws = rng(2)
    family = draw_family(kind, 4, draws)
    y = draw_slow(3, draws)
    expected = np.stack([differences(family.generator, one) for one in y])
    np.testing.assert_allclose(family.derivative(y), expected, atol=1e-8)


def test_closed_classes_and_gap_of_known_graphs() -> None:
    rates = np.zeros((5, 5))
    # 0 -> 1 <-> 2 and 0 -> 3 <-> 4
    for source, target in [(0, 1), (1, 2), (2, 1), (0, 3), (3, 4), (4, 3)]:
        rates[target, source] = 1.0
    assert closed_classes(rates - np.diag(rates.sum(axis=0))) == [[1, 2], [3, 4]]
    assert gap(two_states(3.0, 0.5)[0]) == pytest.approx(3.5, rel=1e-12)


# The stationary distribution and the group inverse


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("states", [3, 6])
def test_three_ways_to_the_stationary_distribution(kind: Kind, states: int) -> None:
    for generator in generators(kind, states, count=2):
        p = by_null_space(generator)
        assert (p > 0).all() and p.sum() == pytest.approx(1.0, abs=1e-14)
        assert np.abs(generator @ p).max() < 1e-12
        assert np.abs(by_trees(generator) - p).max() < 1e-10
        assert np.abs(by_integration(generator, np.eye(states)[0]) - p).max() < 1e-10


@pytest.mark.parametrize("states", [2, 3, 4])
def test_trees_are_spanning_trees_towards_a_root(states: int) -> None:
    """Every choice of one jump out of each state but the root; those that reach it from everywhere are its trees."""
    (generator,) = generators("non-reversible", states, count=1)
    weights = np.zeros(states)
    for root in range(states):
        others = [state for state in range(states) if state != root]
        for targets in itertools.product(range(states), repeat=len(others)):
            step = dict(zip(others, targets, strict=True))
            if all(_arrives(state, step, root) for state in others):
                weights[root] += math.prod(generator[target, source] for source, target in step.items())
    np.testing.assert_allclose(by_trees(generator), weights / weights.sum(), rtol=1e-12)


def _arrives(state: int, step: dict[int, int], root: int) -> bool:
    for _ in step:
        if state != root:
            state = step[state]
    return state == root


def test_relaxation_equals_the_matrix_exponential() -> None:
    (generator,) = generators("one-way ring", 5, count=1)
    start = np.eye(5)[2]
    for time in (0.05, 0.4, 2.0):
        assert np.abs(relax(generator, start, time) - scipy.linalg.expm(time * generator) @ start).max() < 1e-6


@pytest.mark.parametrize(("there", "back"), [(1.0, 1.0), (3.0, 0.5), (1e-3, 7.0), (40.0, 2.0)])
def test_two_states_in_closed_form(there: float, back: float) -> None:
    generator, p, inverse = two_states(there, back)
    assert p == pytest.approx([back / (there + back), there / (there + back)], rel=1e-14)
    for way in (by_null_space(generator), by_trees(generator), by_integration(generator, np.array([0.0, 1.0]))):
        assert np.abs(way - p).max() < 1e-10
    np.testing.assert_allclose(group_inverse(generator, p), inverse, rtol=1e-10, atol=1e-12)
    assert theory.two_state_error(there, back) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_the_group_inverse_solves_its_four_equations(kind: Kind) -> None:
    for states in (3, 6):
        for q in generators(kind, states):
            p = by_null_space(q)
            x = group_inverse(q, p)
            np.testing.assert_allclose(q @ x @ q, q, atol=1e-10)
            np.testing.assert_allclose(x @ q @ x, x, atol=1e-10)
            np.testing.assert_allclose(q @ x, x @ q, atol=1e-10)
            np.testing.assert_allclose(q @ x, np.eye(states) - np.outer(p, np.ones(states)), atol=1e-10)
            assert theory.group_equation_error(q, p, x) < 1e-10
            assert theory.group_equation_error(q, p, np.linalg.pinv(q)) > 1e-3, "another inverse is noticed"
            assert theory.group_equation_error(q, p, -x) > 1e-3, "so is the other sign"


def test_the_group_inverse_is_minus_the_integral_of_what_is_not_yet_stationary() -> None:
    """Q^# = -int_0^inf (exp(Qt) - p_st 1ᵀ) dt: its sign and size without any equation it was computed from."""
    (q,) = generators("non-reversible", 4, count=1)
    p = by_null_space(q)
    projector = np.outer(p, np.ones(4))
    integral, _ = scipy.integrate.quad_vec(lambda t: scipy.linalg.expm(q * t) - projector, 0.0, 20.0, epsabs=1e-11)
    np.testing.assert_allclose(group_inverse(q, p), -integral, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_stationary_distribution_moves_as_its_derivative_says(kind: Kind) -> None:
    draws = rng(3)
    family = draw_family(kind, 4, draws)
    for y in draw_slow(3, draws):
        p = by_null_space(family.generator(y))
        moved = movement(group_inverse(family.generator(y), p), family.derivative(y), p)
        np.testing.assert_allclose(moved, differences(lambda z: by_null_space(family.generator(z)), y), atol=1e-8)


def test_many_points_at_once_equal_one_at_a_time() -> None:
    draws = rng(4)
    system = draw_system(draw_family("non-reversible", 4, draws), draws)
    y = draw_slow(5, draws)
    together = slow_manifold(system, y, 0.1)
    for number, one in enumerate(y):
        for many, single in zip(together, slow_manifold(system, one, 0.1), strict=True):
            np.testing.assert_allclose(many[number], single, rtol=1e-12)


def test_linear_algebra_as_the_command_checks_it() -> None:
    found = theory.check_stationary(rng(), sizes=(3,), points=1)
    assert max(found.three_ways, found.two_states, found.group_equations) < 1e-10
    assert 0 < found.movement < 1e-7
    assert all(claim.ok for claim in theory.claims_on_stationary(found))


# The slow manifold


@pytest.fixture(scope="module")
def convergences() -> list[Convergence]:
    draws = rng(5)
    kinds: tuple[Kind, ...] = ("reversible", "one-way ring")
    return [converge(draw_system(draw_family(kind, 3, draws), draws)) for kind in kinds]


def test_an_order_is_the_exponent_of_a_power_law() -> None:
    assert EPSILONS == (1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256, 1 / 512)
    assert order(EPSILONS, 7.0 * np.array(EPSILONS) ** 1.5) == pytest.approx(1.5, abs=1e-12)


def test_distance_to_the_stationary_distribution_is_of_order_eps(convergences: list[Convergence]) -> None:
    """The fit is over the whole range 1/4 ... 1/512; at its small end the local slope is the limit's."""
    for found in convergences:
        assert order(EPSILONS, found.zeroth) == pytest.approx(1.0, abs=0.05)
        assert found.zeroth_order == order(EPSILONS, found.zeroth)
        assert np.log2(found.zeroth[-2] / found.zeroth[-1]) == pytest.approx(1.0, abs=0.01)
        assert found.zeroth[-1] > 1e-6, "there is something to converge"


def test_the_first_order_manifold_leaves_order_eps_squared(convergences: list[Convergence]) -> None:
    for found in convergences:
        assert order(EPSILONS, found.first) == pytest.approx(2.0, abs=0.1)
        assert found.first_order == order(EPSILONS, found.first)
        assert np.log2(found.first[-2] / found.first[-1]) == pytest.approx(2.0, abs=0.03)


def test_what_is_measured_is_not_the_solver(convergences: list[Convergence]) -> None:
    for found in convergences:
        assert found.solver_error < 0.01
        assert found.off_simplex < 1e-8
    # Another method, at an eps where it is quick.
    assert theory.compare_solvers(convergences[0].system, eps=1 / 32) < 0.01


def test_distances_count_after_the_initial_layer() -> None:
    """Started off the manifold or on it: the same distances, though the start is far from the manifold."""
    draws = rng(6)
    system = draw_system(draw_family("non-reversible", 3, draws), draws)
    for eps in (1 / 4, 1 / 32):
        off, on = solve(system, eps), solve(system, eps, at_rest=True)
        p = by_null_space(system.family.generator(off.y[0]))
        assert total_variation(off.x[0], p) > 0.2
        assert total_variation(on.x[0], p) < 1e-12
        far, near = distances(system, off, eps), distances(system, on, eps)
        # y is a little elsewhere, since the layer pushed it; hence a few per cent.
        assert far.zeroth == pytest.approx(near.zeroth, rel=0.1)
        assert far.first == pytest.approx(near.first, rel=0.2)


def test_the_flow_has_the_jacobian_it_says_and_keeps_y_in_the_disc() -> None:
    draws = rng(7)
    system = draw_system(draw_family("one-way ring", 4, draws), draws)
    state = np.concatenate([draws.dirichlet(np.ones(4)), [0.4, -0.9]])
    expected = differences(lambda s: system.slopes(s, 0.1), state).T
    np.testing.assert_allclose(system.jacobian(state, 0.1), expected, atol=1e-6)
    x = draws.dirichlet(np.full(4, 0.2), 500)
    angle = draws.uniform(0, 2 * np.pi, 500)
    edge = RADIUS * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    assert (np.einsum("bi,bi->b", edge, system.flow(x, edge)) < 0).all(), "inwards all round"


# phi without targets


@pytest.fixture(scope="module")
def fits() -> dict[Kind, dict[int, list[variational.Fit]]]:
    draws = rng(8)
    return {
        "non-reversible": variational.fits_by_width(draw_family("non-reversible", 4, draws), draws, widths=(2, 4, 8))
    }


def test_phi_finds_the_stationary_distribution_on_points_it_never_saw(
    fits: dict[Kind, dict[int, list[variational.Fit]]],
) -> None:
    for by_width in fits.values():
        means = [theory.mean_error(by_width[width]) for width in (2, 4, 8)]
        assert means == sorted(means, reverse=True) and means[0] > 3 * means[2]
        assert max(fit.worst for fit in by_width[8]) < 1e-2
        assert all(fit.mean <= fit.worst for runs in by_width.values() for fit in runs)
        assert max(fit.identity for runs in by_width.values() for fit in runs) < 1e-10
    assert all(claim.ok for claim in theory.claims_on_fits(fits))


def test_training_never_looks_at_the_stationary_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("phi is trained without targets")

    family = draw_family("non-reversible", 3, rng(9))
    y = draw_slow(50, rng(9))
    with monkeypatch.context() as closed:
        for name in ("by_null_space", "group_inverse", "total_variation"):
            closed.setattr(variational, name, forbidden)
        untrained, trained = (variational.train_phi(family, y, 4, seed=1, steps=steps) for steps in (0, 30))
    before, after = variational.judge(family, untrained, y), variational.judge(family, trained, y)
    assert after.mean < before.mean / 10


# What breaks


@pytest.fixture(scope="module")
def closing() -> Closing:
    draws = rng(10)
    system = draw_system(draw_family("non-reversible", 4, draws), draws)
    return examine_closing(system, draw_slow(1, draws)[0])


def test_a_reducible_generator_is_reported() -> None:
    draws = rng(11)
    family = draw_family("non-reversible", 6, draws)
    y = draw_slow(1, draws)[0]
    found = examine_reducible(family.bridged(0.0).generator(y))
    assert found.classes == [[0, 1, 2], [3, 4, 5]]
    assert found.zero_modes == 2
    assert all(found.refusals.values()), found.refusals
    assert found.apart == pytest.approx(1.0, abs=1e-8)
    for way in (by_null_space, by_trees, lambda q: by_integration(q, np.eye(6)[0])):
        with pytest.raises(NotUnique):
            way(family.bridged(0.0).generator(y))
        way(family.bridged(1e-3).generator(y))


def test_one_closed_class_still_has_one_stationary_distribution() -> None:
    draws = rng(12)
    generator, closed = trap(draw_family("non-reversible", 5, draws), draw_slow(1, draws)[0])
    assert closed_classes(generator) == [list(range(closed))]
    p = by_null_space(generator)
    assert np.abs(p[closed:]).max() < 1e-12
    assert np.abs(by_trees(generator) - p).max() < 1e-10
    assert np.abs(by_integration(generator, np.eye(5)[4]) - p).max() < 1e-10


def test_a_gap_that_closes_is_reported(closing: Closing) -> None:
    assert closing.gap_order == pytest.approx(1.0, abs=0.05)
    assert closing.inverse_order == pytest.approx(-1.0, abs=0.05)
    assert closing.error_order < 0.5, "eps is not small against the gap: no first order"
    assert closing.small_error_order == pytest.approx(1.0, abs=0.1), "far below the gap it is back"


# The command


@pytest.fixture
def small(
    convergences: list[Convergence], fits: dict[Kind, dict[int, list[variational.Fit]]], closing: Closing
) -> theory.Theory:
    draws = rng(13)
    family = draw_family("non-reversible", 4, draws)
    reducible = examine_reducible(family.bridged(0.0).generator(draw_slow(1, draws)[0]))
    broken = theory.Breakdown(reducible, closing, trapped=0.0, outside=0.0)
    claims = [
        *theory.claims_on_convergence(convergences, other_solver=1e-4),
        *theory.claims_on_fits(fits),
        *theory.claims_on_breakdown(broken),
    ]
    layer = {0.25: (np.linspace(0, 6, 50), np.exp(-np.linspace(0, 6, 50)))}
    return theory.Theory(3, convergences, layer, fits, broken, claims)


def test_the_report_holds_every_claim(small: theory.Theory, tmp_path: Path) -> None:
    assert small.ok, [claim for claim in small.claims if not claim.ok]
    written = theory_report.write_report(small, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in written}
    text = (tmp_path / "report.md").read_text()
    assert "--seed 3" in text and "Every check holds" in text
    assert text.count("| ok |") == len(small.claims)
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["ok"] is True and len(found["claims"]) == len(small.claims)
    for path in tmp_path.glob("*.png"):
        assert f"]({path.name})" in text
        assert path.stat().st_size > 10_000
    out = io.StringIO()
    theory_report.print_claims(small.claims, Console(file=out, width=160))
    assert out.getvalue().count(" ok") == len(small.claims)


def test_a_failed_check_is_exit_status_1(small: theory.Theory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastslow_scale.cli import app

    slower = dataclasses.replace(small.convergences[0], zeroth_order=0.93)
    (failed, *_) = theory.claims_on_convergence([slower, *small.convergences[1:]], 0.0)
    assert not failed.ok and failed.measured.startswith("0.93")
    monkeypatch.setattr(theory, "study_theory", lambda seed, progress: small)
    assert CliRunner().invoke(app, ["theory", "--output", str(tmp_path / "well")]).exit_code == 0
    broken = dataclasses.replace(small, claims=[failed, *small.claims[1:]])
    monkeypatch.setattr(theory, "study_theory", lambda seed, progress: broken)
    done = CliRunner().invoke(app, ["theory", "--output", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "failed" in done.output
    assert "**1 of" in (tmp_path / "out" / "report.md").read_text()


def test_what_is_not_a_number_does_not_hold(convergences: list[Convergence]) -> None:
    lost = dataclasses.replace(convergences[0], first_order=math.nan)
    claims = theory.claims_on_convergence([*convergences, lost], 0.0)
    assert [claim.ok for claim in claims] == [True, False, True, True, True]


def test_an_output_that_is_a_file_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    assert "taken" in refused("theory", "--output", tmp_path / "taken")


@pytest.mark.slow
def test_the_command_from_end_to_end(tmp_path: Path) -> None:
    printed = fastslow("theory", "--output", tmp_path / "out", timeout=400)
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert found["ok"] is True and len(found["claims"]) == 27
    assert all(claim["ok"] for claim in found["claims"])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("report.md", "report.json", "orders.png", "layer.png", "phi.png", "breakdown.png")
    }
    assert "The slow manifold" in printed and "failed" not in printed
