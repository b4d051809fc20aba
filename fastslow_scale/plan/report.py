"""A plan in words and as an object for machines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from data_pipeline.errors import UserError
from fastslow_scale.config import Config
from fastslow_scale.plan.communication import groups_of, planned_traffic, seconds
from fastslow_scale.plan.machine import Machine
from fastslow_scale.plan.memory import memory
from fastslow_scale.plan.parameters import parameter_parts
from fastslow_scale.plan.search import (
    RECOMPUTE,
    Candidate,
    judge,
    largest_micro_batch,
    ranked,
    what_would_help,
    why_it_lost,
)

LOSERS = 10


@dataclass(frozen=True)
class Plan:
    """Attributes: own: the config as it stands; layouts: all that were tried, best first; needed: what would help."""

    machine: Machine
    own: Candidate
    bucket_elements: int
    largest_micro_batch: int | None
    layouts: list[Candidate]
    needed: list[str]

    @property
    def config(self) -> Config:
        return self.own.config


def make_plan(config: Config, machine: Machine, bucket_elements: int) -> Plan:
    """Raises `UserError`: the config cannot run on so many ranks."""
    found = ranked(config, machine, bucket_elements)
    try:
        own = judge(config, machine, bucket_elements)
    except UserError as error:
        if not found:
            raise
        raise UserError(f"{error}; a layout that can run there: {found[0].name}") from None
    return Plan(
        machine,
        own,
        bucket_elements,
        largest_micro_batch(config, machine, bucket_elements),
        found,
        [] if own.fits else what_would_help(config, machine, bucket_elements),
    )


def lines(plan: Plan) -> list[str]:
    """All of it is predicted; nothing has run but, for `cpu`, the measurement of this machine's peaks."""
    machine, own = plan.machine, plan.own
    return [
        f"predicted for {machine.nodes} x {machine.ranks_per_node} {machine.name}: {own.name}",
        "",
        *_parameters(plan),
        "",
        *_memory(plan),
        "",
        *_traffic(plan),
        "",
        *_time(plan),
        "",
        *_budget(plan),
        "",
        *_layouts(plan),
    ]


def as_object(plan: Plan) -> dict[str, Any]:
    """The numbers behind `lines`: bytes, seconds, elements."""
    tp = plan.config.parallel.tensor_parallel_size
    winner = plan.layouts[0] if plan.layouts else plan.own
    return {
        "machine": asdict(plan.machine),
        "parameters": {part.name: {"whole": part.elements, "rank": part.on_rank(tp)} for part in _parts(plan)},
        "config": _candidate(plan.own),
        "traffic_is_estimate": plan.config.parallel.zero_stage == 3,
        "traffic": {
            f"{group} {kind}": {"calls": entry.calls, "bytes": entry.bytes}
            for (group, kind), entry in planned_traffic(plan.config, plan.own.dp, plan.bucket_elements).items()
        },
        "largest_micro_batch": plan.largest_micro_batch,
        "budget": budget(plan.own, plan.machine),
        "layouts": [_candidate(layout) | {"why": _why(layout, winner)} for layout in plan.layouts],
        "needed": plan.needed,
    }


def budget(candidate: Candidate, machine: Machine) -> dict[str, float]:
    """Of the whole run: tokens, hours, GPU hours and kWh, the GPUs at their highest power, nothing else counted."""
    train, step = candidate.config.train, candidate.time.seconds
    hours = train.num_steps * step / 3600
    return {
        "tokens": train.num_steps * train.tokens_per_step,
        "hours": hours,
        "rank_hours": hours * machine.ranks,
        "kwh": hours * machine.ranks * machine.power_watts / 1000,
    }


def _parts(plan: Plan) -> list[Any]:
    return parameter_parts(plan.config)


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "name": candidate.name,
        "fits": candidate.fits,
        "peak_bytes": candidate.memory.peak,
        "engine_bytes": asdict(candidate.memory.engine),
        "activation_bytes": asdict(candidate.memory.activations),
        "moments_bytes": candidate.memory.moments,
        "seconds": candidate.time.parts,
        "step_seconds": candidate.time.seconds,
        "tokens_per_second": candidate.time.tokens_per_second,
        "mfu": candidate.time.mfu,
    }


def _parameters(plan: Plan) -> list[str]:
    tp = plan.config.parallel.tensor_parallel_size
    rows = [(part.name, part.elements, part.on_rank(tp)) for part in _parts(plan)]
    rows.append(("together", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    return [
        f"{'parameters':28}{'model':>18}{'one rank':>18}",
        *(f"  {name:26}{whole:>18,}{rank:>18,}" for name, whole, rank in rows),
    ]


def _memory(plan: Plan) -> list[str]:
    own, machine = plan.own, plan.machine
    engine, kept = own.memory.engine, own.memory.activations
    rows = [
        ("weights", engine.weights),
        ("optimizer", engine.optimizer),
        ("gradients, always", engine.gradients),
        ("gradients between micro-batches", engine.held),
        ("weights gathered by ZeRO-3", engine.gathered),
        ("buffers and buckets", engine.buffers + engine.buckets + kept.gather_buffer),
        ("kept by the fast layers", kept.fast_layers),
        ("kept by the exchanges", kept.exchanges),
        ("masks of documents", kept.masks),
        ("loss: a chunk of logits, gradients", kept.loss),
    ]
    result = ["GB of one rank", *(f"  {name:40}{size / 1e9:>10.3f}" for name, size in rows if size)]
    result.append(f"  {'peak, at the ' + own.memory.peak_moment:40}{own.memory.peak / 1e9:>10.3f}")
    for mode in RECOMPUTE:
        if mode != plan.config.train.recompute:
            train = plan.config.train.model_copy(update={"recompute": mode})
            other = plan.config.model_copy(update={"train": train})
            peak = memory(other, own.dp, plan.bucket_elements, machine.on_gpu).peak
            result.append(f"  {'peak with recompute ' + mode:40}{peak / 1e9:>10.3f}")
    verdict = "fits" if own.fits else "DOES NOT FIT"
    result.append(
        f"  {verdict} in {machine.memory_bytes / 1e9:.1f} GB; largest micro-batch: {plan.largest_micro_batch or 'none'}"
    )
    return result


def _traffic(plan: Plan) -> list[str]:
    groups = groups_of(plan.machine, plan.config.parallel.tensor_parallel_size)
    estimate = " (dp: an estimate, ZeRO-3 decides at run time)" if plan.config.parallel.zero_stage == 3 else ""
    result = [f"one rank's messages of a step{estimate}"]
    for (name, kind), entry in sorted(planned_traffic(plan.config, plan.own.dp, plan.bucket_elements).items()):
        group = groups[name]
        spent = seconds(kind, entry, group, plan.machine)
        place = f"{group.size} ranks, {group.link}"
        result.append(
            f"  {name:6}{kind:15}{entry.calls:>7} x {entry.bytes / 1e9:>10.4f} GB {spent * 1e3:>10.2f} ms   {place}"
        )
    return result


def _time(plan: Plan) -> list[str]:
    time = plan.own.time
    return [
        f"ms of a step{'':30}",
        *(f"  {name:40}{value * 1e3:>10.1f}" for name, value in sorted(time.parts.items(), key=lambda item: -item[1])),
        f"  {'together':40}{time.seconds * 1e3:>10.1f}",
    ]


def _budget(plan: Plan) -> list[str]:
    time, whole, ranks = plan.own.time, budget(plan.own, plan.machine), plan.machine.ranks
    speed = f"{time.tokens_per_second:,.0f} tokens/s, {time.tokens_per_second / ranks:,.0f} a rank, MFU {time.mfu:.1%}"
    cost = f"{whole['tokens']:,.0f} tokens: {whole['hours'] / 24:.2f} days, {whole['rank_hours']:,.0f} GPU hours"
    energy = f", at most {whole['kwh']:,.0f} kWh by the GPUs" if whole["kwh"] else ""
    return [speed, cost + energy]


def _layouts(plan: Plan) -> list[str]:
    if not plan.layouts or not plan.layouts[0].fits:
        return ["no layout fits on this machine. What would need to be true:", *(f"  {line}" for line in plan.needed)]
    winner, *others = plan.layouts
    needed = ["", "the config does not fit as it stands. What would need to be true:", *(f"  {x}" for x in plan.needed)]
    return [
        f"fastest of {len(plan.layouts)} layouts: {winner.name}",
        f"  {winner.time.seconds:.3g} s a step, MFU {winner.time.mfu:.1%}, {winner.memory.peak / 1e9:.1f} GB",
        *(f"  {layout.name}: {_why(layout, winner)}" for layout in others[:LOSERS]),
        *([f"  and {len(others) - LOSERS} more (--json has them all)"] if len(others) > LOSERS else []),
        *(needed if plan.needed else []),
    ]


def _why(layout: Candidate, winner: Candidate) -> str:
    return "" if layout is winner else why_it_lost(layout, winner)
