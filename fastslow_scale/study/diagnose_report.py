"""What `fastslow diagnose` leaves: a verdict and a table, one page of figures, and the numbers as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import rich.box
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from data_pipeline.files import write_durably
from fastslow_scale.study.diagnose import Diagnosis
from fastslow_scale.study.statistics import Comparison

FIGURE = "diagnosis.png"
Row = tuple[str, str, str]


def verdict(found: Diagnosis) -> list[str]:
    """What the numbers say, a sentence each."""
    low, high = found.closed.interval_95
    if low <= 0 <= high:
        gate = "The gate is closed in function: with it at zero the held-out loss does not change measurably"
    else:
        gate = f"The gate is open: with it at zero the held-out loss {'rises' if low > 0 else 'falls'}"
    swap_low, _ = found.swapped.interval_95
    says = (
        "what comes back tells something about the text"
        if swap_low > 0
        else "what comes back says nothing about the text"
    )
    ratios = [each.timescale_ratio(found.pool_size) for each in found.exchanges]
    slower = "slower" if max(ratios) < 1 else "no slower"
    return [
        f"{gate} ({rise(found.closed)}).",
        f"Judged by slow states of another sequence, {says} ({rise(found.swapped)}).",
        f"Per token y changes {' and '.join(f'{ratio:.3f}' for ratio in ratios)} times as much as x "
        f"(1/P is {1 / found.pool_size:.3f}): it is {slower}.",
    ]


def rows(found: Diagnosis) -> list[Row]:
    """Number by number: what, value, and what to hold it against."""
    lines: list[Row] = [
        ("held-out loss", f"{found.loss:.4f} nats", f"{found.sequences} sequences"),
        ("rise with gates closed", rise(found.closed), "0: the slow path does nothing"),
        ("rise with states of another sequence", rise(found.swapped), "0: it says nothing about the text"),
    ]
    if found.doubled is not None:
        lines.append(("rise with P doubled", rise(found.doubled), f"P = {2 * found.pool_size} was never trained"))
    for k, (each, after) in enumerate(zip(found.exchanges, found.exchange_after, strict=True)):
        name = f"exchange {k}, after layer {after}: "
        later = each.contribution[found.pool_size :]
        dimensions = len(each.spectrum)
        lines += [
            (
                f"{name}contribution |c|/|x|",
                f"{later.mean():.4f}",
                f"{later.min():.4f} to {later.max():.4f} by position",
            ),
            (f"{name}change of x per token", f"{each.x_rate:.3f}", "relative"),
            (f"{name}change of y per block", f"{each.y_rate:.3f}", "relative"),
            (
                f"{name}y's change per token over x's",
                f"{each.timescale_ratio(found.pool_size):.3f}",
                f"eps = 1/P = {1 / found.pool_size:.3f} in the equations",
            ),
            (f"{name}R² from phi(y) to x", f"{each.phi_r2:.3f}", f"from the pooled tokens: {each.pooled_r2:.3f}"),
            (f"{name}effective rank of pooled tokens", f"{each.effective_rank:.1f}", f"of {dimensions}"),
        ]
    return lines


def rise(result: Comparison) -> str:
    low, high = result.interval_95
    return f"{result.mean:+.5f} nats, 95% interval {low:+.5f} to {high:+.5f}"


def print_diagnosis(found: Diagnosis, console: Console) -> None:
    table = Table(box=rich.box.SIMPLE)
    for heading in ("", "measured", "beside"):
        table.add_column(heading)
    for row in rows(found):
        table.add_row(*row)
    console.print(table)
    for line in verdict(found):
        console.print(line, markup=False, highlight=False)


def write_diagnosis(found: Diagnosis, output: Path) -> list[Path]:
    """report.md, report.json and one page of figures."""
    FigureCanvasAgg(draw(found)).print_png(str(output / FIGURE))
    lines = [f"# What the slow path does in {found.checkpoint}", "", *(f"- {line}" for line in verdict(found)), ""]
    lines += ["| | measured | beside |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows(found)), ""]
    lines += [f"![Losses and states]({FIGURE})", "", "docs/theory.md says what each number stands for.", ""]
    write_durably(output / "report.md", "\n".join(lines).encode())
    write_durably(output / "report.json", (json.dumps(to_json(found), indent=1) + "\n").encode())
    return [output / name for name in ("report.md", "report.json", FIGURE)]


def to_json(found: Diagnosis) -> dict[str, object]:
    changes = {"closed": found.closed, "swapped": found.swapped, "doubled": found.doubled}
    return {
        "checkpoint": str(found.checkpoint),
        "variant": found.variant,
        "pool_size": found.pool_size,
        "sequences": found.sequences,
        "loss": found.loss,
        "rises": {
            name: {"mean": result.mean, "interval_95": list(result.interval_95)}
            for name, result in changes.items()
            if result is not None
        },
        "by_position": numbers(found.by_position),
        "by_place_in_block": numbers(found.by_place),
        "exchanges": [
            {
                "after_layer": after,
                "contribution": numbers(each.contribution),
                "x_rate": each.x_rate,
                "y_rate": each.y_rate,
                "timescale_ratio": each.timescale_ratio(found.pool_size),
                "phi_r2": each.phi_r2,
                "pooled_r2": each.pooled_r2,
                "effective_rank": each.effective_rank,
                "spectrum": numbers(each.spectrum),
            }
            for each, after in zip(found.exchanges, found.exchange_after, strict=True)
        ],
        "verdict": verdict(found),
    }


def numbers(values: torch.Tensor) -> list[float | None]:
    return [value if value == value else None for value in values.tolist()]


def draw(found: Diagnosis) -> Figure:
    """Six panels on one page."""
    figure = Figure(figsize=(11, 12), layout="constrained")
    panels: list[Axes] = list(figure.subplots(3, 2).flat)
    panels[0].plot(found.by_position, linewidth=0.8)
    _label(panels[0], "position in the sequence", "loss, nats")
    panels[1].plot(found.by_place, "o-")
    _label(panels[1], "place in the block", "loss, nats (first block left out)")
    panels[2].plot(found.closed_by_position, linewidth=0.8)
    panels[2].axhline(0, color="grey", linewidth=0.8)
    _label(panels[2], "position in the sequence", "rise with gates closed, nats")
    for k, each in enumerate(found.exchanges):
        name = f"exchange {k}"
        panels[3].plot(each.contribution, label=name, linewidth=0.8)
        panels[4].semilogy(torch.arange(1, len(each.spectrum) + 1), each.spectrum.clamp(min=1e-12), label=name)
    _label(panels[3], "position in the sequence", "contribution |c| / |x|")
    _label(panels[4], "principal axis of the pooled tokens", "share of the variance")
    places, width = range(len(found.exchanges)), 0.35
    panels[5].bar(
        [k - width / 2 for k in places], [each.x_rate for each in found.exchanges], width, label="x, per token"
    )
    panels[5].bar(
        [k + width / 2 for k in places], [each.y_rate for each in found.exchanges], width, label="y, per block"
    )
    panels[5].set_xticks(list(places), [f"exchange {k}" for k in places])
    _label(panels[5], "", "relative change")
    for panel in panels[3:]:
        panel.legend(fontsize=8)
    return figure


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
