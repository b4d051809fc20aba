"""What `fastslow ablate` leaves: a table on the terminal, report.md, report.json, figures, TensorBoard's hparams."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table
from torch.utils.tensorboard import SummaryWriter

from data_pipeline.files import write_durably
from fastslow_scale.study.ablation import Ablation, ArmResult, Compared
from fastslow_scale.study.ablation_figures import write_figures
from fastslow_scale.study.runs import OTHER_SEEDS
from fastslow_scale.study.statistics import POWER, Interval, compare
from fastslow_scale.versions import versions

COMPARISON_HEADINGS = (
    "comparison", "difference", "95% interval", "90% interval", "p", "p Holm", "p equiv.", "smallest effect", "verdict",
)  # fmt: skip


def print_ablation(found: Ablation, console: Console) -> None:
    """The comparisons, as a table that fits 80 columns; report.md has the rest."""
    shown = [COMPARISON_HEADINGS.index(heading) for heading in ("comparison", "difference", "95% interval", "verdict")]
    table = Table(box=rich.box.SIMPLE)
    for column in shown:
        table.add_column(COMPARISON_HEADINGS[column], no_wrap=True)
    for compared in found.compared:
        row = comparison_row(compared)
        table.add_row(*(row[column] for column in shown))
    console.print(table)
    console.print(f"differences in nats of validation loss, negative: better; margin {found.study.margin:g}")


def write_report(found: Ablation, output: Path, command: str) -> list[Path]:
    """report.md, report.json, figures and tb/; what an earlier report left there is replaced."""
    figures = write_figures(found, output)
    write_durably(output / "report.json", (json.dumps(to_json(found, command), indent=1) + "\n").encode())
    write_durably(output / "report.md", markdown(found, command, figures).encode())
    write_hparams(found, output / "tb")
    return [output / name for name in ("report.md", "report.json", *figures)]


def markdown(found: Ablation, command: str, figures: dict[str, str]) -> str:
    study = found.study
    config = found.baseline.runs[0].run.config()
    lines = [f"# Does the slow coupling help? {Path(study.config_path).name}", "", f"    {command}"]
    lines += ["", *(f"- {sentence(compared)}" for compared in found.compared), "", "## Comparisons", ""]
    lines += [
        f"Final validation loss in nats a token, paired by seed ({study.seeds} seeds, {found.tokens:,} tokens a run, "
        f"{config.train.seq_length} tokens a sequence). Negative: the first is better. Intervals by Student's t; p "
        f"Holm is corrected for the {len(found.compared)} comparisons here; p equiv. is that of two one-sided tests "
        f"against the margin of {study.margin:g} nats, chosen before the runs; the smallest effect is what this "
        f"many seeds would have found {POWER:.0%} of the time.",
        "",
        *table(COMPARISON_HEADINGS, (comparison_row(compared) for compared in found.compared)),
        "",
        "The verdict is `equivalent` if the 90% interval lies inside the margin, else `better` or `worse` if the 95% "
        "interval excludes zero, else `undecided`. It is not corrected for the number of comparisons; p Holm is.",
        "",
        "## Arms",
        "",
        *table(
            ("arm", "parameters", "FLOPs a token", "learning rate", "validation loss", "step time", "changed keys"),
            (arm_row(found, arm) for arm in found.arms.values()),
        ),
        "",
        f"In brackets, and for the step time, ratios to {study.baseline}; step time is the median over seeds of the "
        "ratio of paired runs' median steps.",
        "",
        noise_sentence(found),
    ]
    gated = [arm for arm in found.arms.values() if arm.runs[0].gates]
    if gated:
        lines += ["", "## Is the gate closed?", "", *gate_section(gated)]
    if found.sweep:
        lines += ["", "## Learning rates", "", *sweep_section(found)]
    claims = claim_rows(found)
    if claims:
        lines += ["", "## Beside the paper", "", *table(("arXiv 2606.16730, at 500k tokens", "here"), claims)]
    lines += ["", "## Figures", ""]
    lines += [line for name, title in figures.items() for line in (f"![{title}]({name})", "", f"*{title}.*", "")]
    lines += ["## Runs", "", *table(("arm", "seed", "validation loss"), run_rows(found)), ""]
    return "\n".join([*lines, *(f"- {line}" for line in versions())]) + "\n"


def noise_sentence(found: Ablation) -> str:
    over_seeds = (
        f"Run-to-run noise of {found.study.baseline}: standard deviation {number(found.loss_noise())} nats over seeds "
        "(weights and order)"
    )
    if not found.order_losses:
        return f"{over_seeds}."
    orders = len(found.order_losses) + 1
    return f"{over_seeds}, {number(found.order_noise())} over {orders} orders of the data with the same weights."


def sentence(compared: Compared) -> str:
    """The verdict in words."""
    one, other, result = compared.variant, compared.baseline, compared.result
    low, high = result.interval_95
    by = f"{result.mean:+.4f} nats, 95% interval {low:+.4f} to {high:+.4f}"
    if len(result.differences) < 2:
        return f"**{one}** against **{other}**: one seed decides nothing ({result.mean:+.4f} nats)."
    if result.sd == 0 and result.mean == 0:
        return f"**{one}** is **{other}**, to the last bit: **equivalent**."
    words = {
        "equivalent": f"is equivalent to **{other}** within {result.margin:g} nats",
        "better": f"is better than **{other}**",
        "worse": f"is worse than **{other}**",
        "undecided": f"against **{other}** is undecided: {len(result.differences)} seeds could have found "
        f"{number(result.smallest_effect)} nats",
    }
    return f"**{one}** {words[result.verdict]} ({by})."


def comparison_row(compared: Compared) -> list[str]:
    result = compared.result
    return [
        f"{compared.variant} - {compared.baseline}",
        f"{result.mean:+.4f}",
        interval(result.interval_95),
        interval(result.interval_90),
        number(result.p_difference),
        number(compared.p_holm),
        number(result.p_equivalence),
        number(result.smallest_effect),
        result.verdict,
    ]


def arm_row(found: Ablation, arm: ArmResult) -> list[str]:
    base = found.baseline
    return [
        arm.arm.name,
        f"{arm.size.parameters:,} ({arm.size.parameters / base.size.parameters:.3f})",
        f"{arm.size.flops_per_token:.4g} ({arm.size.flops_per_token / base.size.flops_per_token:.3f})",
        f"{arm.rate:g}",
        f"{mean(arm.losses):.4f}",
        f"{found.time_ratio(arm.arm.name, base.arm.name):.3f}",
        " ".join(f"`{override}`" for override in arm.arm.overrides),
    ]


def gate_section(arms: Sequence[ArmResult]) -> list[str]:
    """Judged by what the model loses without it, never by its size."""
    rows = []
    for arm in arms:
        measured = [run.measured for run in arm.runs]
        effects = [compare([getattr(each, name) for each in measured], 1.0) for name in ("gate_effect", "swap_effect")]
        tiny = [each.tiny_gradients for each in measured]
        rows.append(
            [
                arm.arm.name,
                f"{mean(max(run.gates) for run in arm.runs):.4g}",
                *(f"{effect.mean:+.5f} ({interval(effect.interval_95, 5)})" for effect in effects),
                ", ".join(f"{mean(each[limit] for each in tiny):.1%} < {limit}" for limit in tiny[0]) or "none trained",
            ]
        )
    headings = ("arm", "largest gate's norm", "loss with gates at zero", "loss with states swapped", "slow gradients")
    return [
        *table(headings, rows),
        "",
        f"Held-out loss (nats, mean over seeds with its 95% interval) of the same trained models over "
        f"{arms[0].runs[0].measured.sequences} sequences: what is lost when nothing comes back from the slow path, and "
        "when what comes back was computed from another sequence. A gate is closed if the first is nil, and says "
        "nothing about the text if the second is. Slow gradients: the share below AdamW's usual eps, and below the "
        "slow weights' own, of one batch's mean loss after training.",
    ]


def sweep_section(found: Ablation) -> list[str]:
    rates = list(found.study.sweep)
    rows = [
        [arm, *(f"{losses[rate]:.4f}" for rate in rates), f"{min(losses, key=losses.__getitem__):g}"]
        for arm, losses in found.sweep.items()
    ]
    return [
        *table(("arm", *(f"{rate:g}" for rate in rates), "chosen"), rows),
        "",
        f"Validation loss of one run each, with seed {OTHER_SEEDS}, which no comparison uses.",
    ]


def claim_rows(found: Ablation) -> list[list[str]]:
    """The paper's claims, where this study has the arms for them."""
    by_pair = {(compared.variant, compared.baseline): compared for compared in found.compared}
    rows = []
    for pair, claim in {
        ("coupled", "dense"): "the coupling is neutral",
        ("coupled", "frozen"): "coupled and frozen are within run-to-run noise",
        ("coupled", "frozen_slow"): "the same, if frozen means random slow weights",
    }.items():
        if pair in by_pair:
            result = by_pair[pair].result
            noise = found.loss_noise()
            rows.append([claim, f"{result.verdict}: {result.mean:+.4f} nats; noise over seeds {number(noise)}"])
    if "coupled" in found.arms:
        measured = [run.measured for run in found.arms["coupled"].runs]
        effect = mean(each.gate_effect for each in measured)
        rows.append(["the gate stays closed", f"closing it changes the loss by {effect:+.5f} nats"])
        for baseline in (name for name in found.arms if name.startswith("dense")):
            ratio = found.time_ratio("coupled", baseline)
            rows.append(
                [
                    "a cost comparable to a dense baseline (a summary says 0.97x)",
                    f"{ratio:.3f}x the step time of {baseline}",
                ]
            )
    return rows


def run_rows(found: Ablation) -> Iterable[list[str]]:
    for arm in found.arms.values():
        for run in arm.runs:
            yield [arm.arm.name, str(run.run.seed), f"{run.loss:.6f}"]
    for k, loss in enumerate(found.order_losses, start=1):
        yield [f"{found.study.baseline}, order {k}", "0", f"{loss:.6f}"]


def to_json(found: Ablation, command: str) -> dict[str, Any]:
    """Everything the report says, as numbers."""
    study = found.study
    return plain(
        {
            "command": command,
            "config": study.describe()["config"],
            "margin_nats": study.margin,
            "tokens": found.tokens,
            "seeds": study.seeds,
            "arms": {
                name: {
                    "overrides": list(arm.arm.overrides),
                    "parameters": arm.size.parameters,
                    "flops_per_token": arm.size.flops_per_token,
                    "lr": arm.rate,
                    "losses": arm.losses,
                    "step_seconds": [run.step_seconds for run in arm.runs],
                    "gate_norms": [run.gates for run in arm.runs],
                    "gate_effect": [run.measured.gate_effect for run in arm.runs],
                    "swap_effect": [run.measured.swap_effect for run in arm.runs],
                    "tiny_gradients": [run.measured.tiny_gradients for run in arm.runs],
                }
                for name, arm in found.arms.items()
            },
            "comparisons": [
                {"variant": each.variant, "baseline": each.baseline, "p_holm": each.p_holm, **asdict(each.result)}
                for each in found.compared
            ],
            "noise": {"seeds": found.loss_noise(), "orders": found.order_noise(), "order_losses": found.order_losses},
            "sweep": {arm: {f"{rate:g}": loss for rate, loss in losses.items()} for arm, losses in found.sweep.items()},
            "versions": versions(),
        }
    )


def plain(value: Any) -> Any:
    """Numbers that JSON does not know become null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_hparams(found: Ablation, directory: Path) -> None:
    """One line a run in TensorBoard's HPARAMS tab."""
    for old in directory.glob("*/events.out.tfevents.*"):
        old.unlink()
    for name, arm in found.arms.items():
        for run in arm.runs:
            with SummaryWriter(str(directory / f"{name}-{run.run.seed}")) as writer:
                described = {"arm": name, "seed": run.run.seed, "lr": arm.rate, "parameters": arm.size.parameters}
                results = {
                    "study/validation_loss": run.loss,
                    "study/gate_effect": run.measured.gate_effect,
                    "study/step_seconds": run.step_seconds,
                }
                writer.add_hparams(described, results, run_name=".")


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def interval(ends: Interval, digits: int = 4) -> str:
    return "-" if math.isnan(ends[0]) else f"{ends[0]:+.{digits}f} to {ends[1]:+.{digits}f}"
