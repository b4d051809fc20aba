"""What the ranks of the layout tests run: each function loops over many layouts inside one start of the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fastslow_scale.config import Config
from fastslow_scale.model.documents import Documents
from fastslow_scale.model.loss import IGNORE
from fastslow_scale.model.model import FastSlowModel, build_model
from fastslow_scale.parallel.mesh import Mesh, build_mesh, start_process_group
from fastslow_scale.parallel.sharing import sharded_dim
from fastslow_scale.train.batch import count_valid
from fastslow_scale.train.engine import Engine, Update
from fastslow_scale.train.optimizer import parameter_groups
from fastslow_scale.train.zero_fragments import EngineState
from tests import reference

EOS = 0


@dataclass(frozen=True)
class Layout:
    """How a run is spread: the config's sections, changed; data parallel is what is left of the ranks."""

    tp: int = 1
    sp: bool = False
    zero: int = 1
    micro_batch_size: int = 2

    def of(self, config: Config) -> Config:
        tree = config.model_dump()
        tree["parallel"] |= {"tensor_parallel_size": self.tp, "sequence_parallel": self.sp, "zero_stage": self.zero}
        tree["train"] |= {"micro_batch_size": self.micro_batch_size}
        return Config.model_validate(tree)


def open_gates(model: FastSlowModel) -> None:
    generator = torch.Generator().manual_seed(5)
    for exchange in model.exchanges:
        exchange.gate.data.copy_(torch.randn(exchange.gate.shape, generator=generator))


def tokens_of(config: Config, batch: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.model.vocab_size, (batch, config.train.seq_length + 1), generator=generator)


def whole(tensor: torch.Tensor, param: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The full tensor from this rank's part of it, which is cut as `param` is."""
    dim = sharded_dim(param)
    if dim is None or mesh.tp_size == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(mesh.tp_size)]
    dist.all_gather(parts, tensor.contiguous(), group=mesh.tp_group)
    return torch.cat(parts, dim)


def compare_with_reference(cases: list[tuple[Config, Layout]]) -> list[dict[str, float]]:
    """Without the engine, in float64: worst relative error of loss and gradients, and of logits before a change."""
    return [_compare(config, mesh) for config, mesh in meshes(cases)]


def meshes(cases: list[tuple[Config, Layout]]) -> Iterator[tuple[Config, Mesh]]:
    """Each case's config and mesh; groups are built anew only where the tensor-parallel size changes."""
    start_process_group()
    mesh = build_mesh(cases[0][1].tp)
    for config, layout in cases:
        if layout.tp != mesh.tp_size:
            mesh = build_mesh(layout.tp)
        yield layout.of(config), mesh


def _compare(config: Config, mesh: Mesh) -> dict[str, float]:
    model = build_model(config, mesh, torch.float64)
    open_gates(model)
    rows = tokens_of(config, batch=2, seed=1)
    tokens, labels = rows[:, :-1], rows[:, 1:].clone()
    labels[0, 2:4] = -100
    documents = None
    if config.data.reset_at_document:
        ends = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(2)) < 0.2
        tokens = tokens.clamp(min=1).masked_fill(ends, EOS)
        documents = Documents.of_tokens(tokens, EOS)
    loss = model(tokens, labels, documents)
    loss.backward()
    names = dict(model.named_parameters())
    weights = {name: whole(p.detach(), p, mesh).clone() for name, p in names.items()}
    gradients = {name: whole(_gradient(p), p, mesh) for name, p in names.items()}
    errors = {"leak": _leak(model, tokens, config)}
    expected = reference_gradients(weights, config, tokens, labels) if mesh.is_main else {}
    answer = [expected]
    dist.broadcast_object_list(answer, src=0)
    for name, wanted in answer[0].items():
        got = loss.detach() if name == "loss" else gradients[name]
        scale = wanted.abs().max().clamp(min=1e-12)
        errors[name] = ((got - wanted).abs().max() / scale).item()
    return errors


def _gradient(param: torch.Tensor) -> torch.Tensor:
    return param.grad if param.grad is not None else torch.zeros_like(param)


def reference_gradients(
    weights: dict[str, torch.Tensor], config: Config, tokens: torch.Tensor, labels: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The loss and the gradient of every weight that the variant trains, from the maths alone."""
    weights = {name: weight.requires_grad_() for name, weight in weights.items()}
    numbers = reference.documents_of(tokens, EOS) if config.data.reset_at_document else None
    loss = reference.loss_sum(weights, config, tokens, labels, numbers)
    loss.backward()
    held = {"frozen": ("exchanges.",), "frozen_slow": ("exchanges.",)}.get(config.model.variant, ())
    learning = (".gate", ".phi_down.weight") if config.model.variant == "frozen_slow" else ()
    trained = {n: w for n, w in weights.items() if not n.startswith(held) or n.endswith(learning)} if held else weights
    return {"loss": loss.detach()} | {name: _gradient(weight) for name, weight in trained.items()}


def _leak(model: FastSlowModel, tokens: torch.Tensor, config: Config) -> float:
    """The most that logits change before the place from which on the tokens change."""
    size, length = config.slow.pool_size, tokens.shape[1]
    prefixes = {1, 3, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 3 * size, length - 1}

    def logits(of: torch.Tensor) -> torch.Tensor:
        return model.logits(of, Documents.of_tokens(of, EOS) if config.data.reset_at_document else None)

    with torch.no_grad():
        before = logits(tokens)
        worst = 0.0
        for prefix in sorted(p for p in prefixes if 0 < p < length):
            changed = tokens.clone()
            changed[:, prefix:] = (changed[:, prefix:] + 7) % config.model.vocab_size
            difference = (logits(changed) - before)[:, :prefix]
            worst = max(worst, difference.abs().max().item())
    return worst


def train_through_engine(cases: list[tuple[Config, Layout]], steps: int) -> list[dict[str, Any]]:
    """Losses, gradient norms and final weights of a few steps through DeepSpeed, and whether replicas agree bitwise."""
    return [_train(config, mesh, steps) for config, mesh in meshes(cases)]


def _train(config: Config, mesh: Mesh, steps: int) -> dict[str, Any]:
    engine = Engine(build_model(config, mesh), config, mesh)
    losses, norms = [], []
    for step in range(steps):
        inputs, labels = (t.chunk(mesh.dp_size)[mesh.dp_rank] for t in batch_of(config, step))
        valid = count_valid(labels, mesh)
        engine.set_learning_rate(config.optimizer.lr)
        total, update = torch.zeros(()), None
        size = config.train.micro_batch_size
        for tokens, targets in zip(inputs.split(size), labels.split(size), strict=True):
            loss = engine.forward(tokens, targets)
            update = engine.backward(loss, valid)
            total += loss.detach()
        assert update is not None
        assert update.applied
        dist.all_reduce(total, group=mesh.dp_group)
        losses.append((total / valid).item())
        norms.append(update.grad_norm)
    weights, agree = _weights(engine, mesh)
    return {"losses": losses, "norms": norms, "weights": weights, "replicas_agree": agree}


def batch_of(config: Config, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of a global batch, [G, T] each. The first rows are half empty: ranks count differently."""
    rows = tokens_of(config, config.train.global_batch_size, seed=step)
    labels = rows[:, 1:].clone()
    labels[:3, config.train.seq_length // 2 :] = IGNORE
    return rows[:, :-1], labels


def _weights(engine: Engine, mesh: Mesh) -> tuple[dict[str, torch.Tensor], bool]:
    import deepspeed

    params = dict(engine.model.named_parameters())
    agree, weights = True, {}
    with deepspeed.zero.GatheredParameters(list(params.values()), enabled=engine.zero_stage == 3):
        for name, p in params.items():
            if sharded_dim(p) is None:
                copies = [torch.empty_like(p) for _ in range(mesh.world_size)]
                dist.all_gather(copies, p.detach().contiguous())
                agree = agree and all(torch.equal(copy, copies[0]) for copy in copies)
            weights[name] = whole(p.detach(), p, mesh).float().clone()
    return (weights if mesh.is_main else {}), agree


def train_plainly(config: Config, steps: int) -> dict[str, Any]:
    """The same steps by one process without DeepSpeed: torch's AdamW and clipping on the whole batch."""
    start_process_group()
    model = build_model(config, build_mesh(1))
    groups = parameter_groups(model, config)
    optimizer = torch.optim.AdamW(groups, betas=config.optimizer.betas, fused=False)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    apart = [name.startswith("exchanges.") and config.optimizer.clip_slow_apart for name, _ in named]
    parts = [[p for (_, p), slow in zip(named, apart, strict=True) if slow is part] for part in (False, True)]
    losses, norms = [], []
    for step in range(steps):
        inputs, labels = batch_of(config, step)
        loss = model(inputs, labels) / (labels != IGNORE).sum()
        loss.backward()
        losses.append(loss.item())
        own = [torch.nn.utils.clip_grad_norm_(part, config.optimizer.grad_clip).item() for part in parts if part]
        norms.append(math.hypot(*own))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}}


def accumulated_gradient(cases: list[tuple[Config, Layout]]) -> list[float]:
    """Relative error of the whole accumulated gradient in bf16 against float64, at the same bf16 weights."""
    return [_accumulation_error(config, mesh) for config, mesh in meshes(cases)]


def _accumulation_error(config: Config, mesh: Mesh) -> float:
    model = build_model(config, mesh)
    exact = build_model(config, mesh, torch.float64)
    for p, q in zip(exact.parameters(), model.parameters(), strict=True):
        p.data.copy_(q.data)
    engine = Engine(model, config, mesh)
    batch, length = config.train.global_batch_size, config.train.seq_length
    valid = torch.tensor(float(batch * length))
    rows = tokens_of(config, batch, seed=0)
    for part in rows.split(config.train.micro_batch_size):
        engine.backward(engine.forward(part[:, :-1], part[:, 1:]), valid)
        exact_loss = exact(part[:, :-1], part[:, 1:]) / valid
        exact_loss.backward()
    # After AdamW's first step its first moment is the gradient, up to a factor.
    state = EngineState(engine.deepspeed)
    moments = {name: torch.zeros(state.local_shape(name).numel()) for name in state.parameters}
    for fragment in state.fragments:
        moment = state.view(fragment, "exp_avg")
        assert moment is not None
        moments[fragment.name][fragment.start : fragment.start + fragment.count] = moment
    got = torch.cat([moments[name] for name, _ in exact.named_parameters()]).double()
    wanted = torch.cat([p.grad.flatten() for p in exact.parameters()])
    return (got / got.norm() - wanted / wanted.norm()).norm().item()


def broken_step(cases: list[tuple[Config, Layout]]) -> list[dict[str, Any]]:
    """A step with a NaN in one rank's weights' gradient: what is reported, and whether weights and moments moved."""
    return [_broken_step(config, mesh) for config, mesh in meshes(cases)]


def _broken_step(config: Config, mesh: Mesh) -> dict[str, Any]:
    engine = Engine(build_model(config, mesh), config, mesh)
    rows = tokens_of(config, config.train.global_batch_size, 0).chunk(mesh.dp_size)[mesh.dp_rank]
    valid = torch.tensor(float(config.train.global_batch_size * config.train.seq_length))

    def step(spoil: float) -> Update:
        engine.set_learning_rate(config.optimizer.lr)
        update = None
        for part in rows.split(config.train.micro_batch_size):
            loss = engine.forward(part[:, :-1], part[:, 1:])
            update = engine.backward(loss * spoil, valid)
        assert update is not None
        return update

    step(1.0)
    before, _ = _weights(engine, mesh)
    update = step(float("nan") if mesh.rank == mesh.world_size - 1 else 1.0)
    after, _ = _weights(engine, mesh)
    recovered = step(1.0)
    return {
        "applied": update.applied,
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "recovered": recovered.applied and math.isfinite(recovered.grad_norm),
    }
