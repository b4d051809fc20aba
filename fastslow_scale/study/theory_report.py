"""What `fastslow theory` leaves: a table on the terminal, report.md, report.json and four figures."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import rich.box
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from data_pipeline.errors import UserError
from data_pipeline.files import write_durably
from fastslow_scale.study.breakdown import BRIDGES, SMALL_EPSILONS, WEAK
from fastslow_scale.study.generators import GAP
from fastslow_scale.study.slow_fast import ATOL, EPSILONS, LAYER, RTOL, Convergence
from fastslow_scale.study.theory import Claim, Theory, mean_error
from fastslow_scale.study.variational import POINTS, RESTARTS

PARTS = {
    "a": "The slow manifold",
    "b": "The stationary distribution",
    "c": "phi learned without targets",
    "d": "What breaks",
}


def prepare_folder(output: Path) -> None:
    """Make the folder before anything is computed.

    Raises:
        UserError: it cannot be made or written to.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror}") from error
    if not os.access(output, os.W_OK):
        raise UserError(f"--output {output}: not writable")


def print_claims(claims: list[Claim], console: Console) -> None:
    """The table: claim, measured, expected, ok or failed."""
    table = Table(box=rich.box.SIMPLE)
    for heading in ("", "claim", "measured", "expected", ""):
        table.add_column(heading)
    for part, title in PARTS.items():
        table.add_section()
        table.add_row("", f"[bold]{title}[/bold]")
        for claim in (claim for claim in claims if claim.part == part):
            verdict = "[green]ok[/green]" if claim.ok else "[bold red]failed[/bold red]"
            table.add_row(claim.part, claim.text, claim.measured, claim.expected, verdict)
    console.print(table)


def write_report(theory: Theory, output: Path) -> list[Path]:
    """report.md, report.json and the figures, in a folder that exists; what a former run left there is replaced."""
    figures = {
        "orders.png": draw_orders(theory.convergences),
        "layer.png": draw_layer(theory),
        "phi.png": draw_fits(theory),
        "breakdown.png": draw_breakdown(theory),
    }
    for name, figure in figures.items():
        FigureCanvasAgg(figure).print_png(str(output / name))
    write_durably(output / "report.md", markdown(theory).encode())
    rows = [dataclasses.asdict(claim) for claim in theory.claims]
    found = {"seed": theory.seed, "ok": theory.ok, "claims": rows}
    write_durably(output / "report.json", (json.dumps(found, indent=1) + "\n").encode())
    return [output / name for name in ("report.md", "report.json", *figures)]


def markdown(theory: Theory) -> str:
    """The table, one row per system, and the figures with what they show."""
    failed = sum(not claim.ok for claim in theory.claims)
    verdict = f"**{failed} of {len(theory.claims)} checks failed.**" if failed else "Every check holds."
    lines = ["# The theory, by numbers", "", f"`fastslow theory --seed {theory.seed}`. {verdict}"]
    for part, title in PARTS.items():
        rows = [
            f"| {claim.text} | {claim.measured} | {claim.expected} | {'ok' if claim.ok else '**failed**'} |"
            for claim in theory.claims
            if claim.part == part
        ]
        lines += ["", f"## {title}", "", "| claim | measured | expected | |", "|---|---|---|---|", *rows]
        lines += ["", *_remarks(part, theory)]
    return "\n".join(lines) + "\n"


def _remarks(part: str, theory: Theory) -> list[str]:
    """What stands below a part's table."""
    if part == "a":
        return [
            "Exponents are slopes of a least-squares line in log-log over all of eps = 1/4 ... 1/512. Distances are "
            f"the largest total variation over slow times t >= {LAYER:g}, at the solver's own steps (Radau, tolerances "
            f"{RTOL:.0e} relative and {ATOL:.0e} absolute). Rates are scaled so that the smallest gap over the disc of "
            f"y is {GAP:g}. Local exponents, between neighbours, show how soon the limit is reached. In each pair: "
            "p_st, then the first-order manifold.",
            "",
            "| generator | states | exponents | local, 1/4 to 1/8 | local, 1/256 to 1/512 | distances at 1/512 |",
            "|---|---|---|---|---|---|",
            *(_system_row(found) for found in theory.convergences),
            "",
            "![Largest distance against eps](orders.png)",
            "",
            "![Distance against time: the initial layer](layer.png)",
        ]
    if part == "c":
        return [
            f"Training minimises the mean of |Q(y) phi(y)|^2 over {POINTS} points y; the numbers are for {POINTS} "
            f"others. Means are medians over {RESTARTS} initial weights, the worst is over those too.",
            "",
            "![Total variation against width](phi.png)",
        ]
    if part == "d":
        refusals = theory.breakdown.reducible.refusals.items()
        return [
            "What the three ways to p_st say of the reducible generator:",
            "",
            *(f"- {way}: {reason or 'an answer, wrongly'}" for way, reason in refusals),
            "",
            "![A gap that closes](breakdown.png)",
        ]
    return []


def _system_row(found: Convergence) -> str:
    local = [np.log2(errors[:-1] / errors[1:]) for errors in (found.zeroth, found.first)]
    ends = [f"{local[0][at]:.3f}, {local[1][at]:.3f}" for at in (0, -1)]
    family = found.system.family
    return (
        f"| {family.kind} | {family.states} | {found.zeroth_order:.4f}, {found.first_order:.4f} "
        f"| {ends[0]} | {ends[1]} | {found.zeroth[-1]:.1e}, {found.first[-1]:.1e} |"
    )


def draw_orders(convergences: list[Convergence]) -> Figure:
    """Largest distance against eps, one line per system, with lines of slope 1 and 2."""
    figure, axes = _axes(r"$\varepsilon$", "largest total variation")
    for k, found in enumerate(convergences):
        label = f"{found.system.family.kind}, {found.system.family.states} states"
        axes.loglog(EPSILONS, found.zeroth, "o-", color=f"C{k}", label=label)
        axes.loglog(EPSILONS, found.first, "s--", color=f"C{k}", markersize=4)
    eps = np.array(EPSILONS)
    highest = [
        np.max([errors[0] for errors in pairs])
        for pairs in zip(*((c.zeroth, c.first) for c in convergences), strict=True)
    ]
    for exponent, top in enumerate(highest, start=1):
        line = 2 * top * (eps / eps[0]) ** exponent
        axes.loglog(eps, line, color="grey", linewidth=0.8)
        axes.annotate(f"slope {exponent}", (eps[4], 1.3 * line[4]), color="grey", ha="right")
    axes.set_title(r"to $p_{st}(y)$ (solid) and to $p_{st} + \varepsilon\, Q^{\#} (dp_{st}/dy)\, g$ (dashed)")
    axes.legend(fontsize=7)
    return figure


def draw_layer(theory: Theory) -> Figure:
    """Distance to p_st(y(t)) against time: a fast fall, then a floor of height eps."""
    figure, axes = _axes("slow time t", r"total variation to $p_{st}(y(t))$")
    for eps, (time, distance) in theory.layer.items():
        axes.semilogy(time, distance, label=f"eps = 1/{round(1 / eps)}")
    axes.axvline(LAYER, color="grey", linewidth=0.8)
    axes.set_title("The initial layer; distances count to the right of the line")
    axes.legend()
    return figure


def draw_fits(theory: Theory) -> Figure:
    """Error on held-out y against width: mean (median over restarts) and worst."""
    figure, axes = _axes("width of phi", r"total variation to $p_{st}(y)$, held-out y")
    widths = sorted({width for by_width in theory.fits.values() for width in by_width})
    for k, (kind, by_width) in enumerate(theory.fits.items()):
        axes.loglog(widths, [mean_error(by_width[width]) for width in widths], "o-", color=f"C{k}", label=kind)
        worst = [max(fit.worst for fit in by_width[width]) for width in widths]
        axes.loglog(widths, worst, "x:", color=f"C{k}")
    axes.axhline(1e-2, color="grey", linewidth=0.8)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    axes.set_title("trained on |Q phi|^2 alone: mean (solid), worst (dotted)")
    axes.legend()
    return figure


def draw_breakdown(theory: Theory) -> Figure:
    """Left: gap and size of Q^# against the bridge. Right: distance against eps, with a bridge that is too weak."""
    closing = theory.breakdown.closing
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.loglog(BRIDGES, closing.gaps, "o-", label="gap")
    left.loglog(BRIDGES, closing.inverses, "s-", label=r"size of $Q^{\#}$")
    left.set_xlabel("strength of the bridge between two halves")
    left.legend()
    right.loglog(EPSILONS, closing.errors, "o-", label=f"bridge 1/{round(1 / WEAK)}")
    right.loglog(SMALL_EPSILONS, closing.small_errors, "o-", color="C0")
    right.loglog(EPSILONS, theory.convergences[0].zeroth, "s-", color="C1", label="a system of part (a)")
    right.set_xlabel(r"$\varepsilon$")
    right.set_ylabel(r"largest total variation to $p_{st}(y)$")
    right.legend()
    return figure


def _axes(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.5, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    return figure, axes
