"""The training loop: batch -> forward -> backward -> clip, step -> log -> maybe validate, maybe checkpoint."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from data_pipeline.batches import step_batches
from data_pipeline.errors import UserError
from fastslow_scale.config import Config
from fastslow_scale.launch.signals import StopSignals, goes_on
from fastslow_scale.model.compiled import compile_inner_parts
from fastslow_scale.model.documents import Documents
from fastslow_scale.model.loss import IGNORE
from fastslow_scale.model.model import build_model
from fastslow_scale.monitor import Monitor, NullMonitor
from fastslow_scale.monitor.peak import Utilisation, memory
from fastslow_scale.monitor.profiler import Profiler
from fastslow_scale.monitor.wandb_log import refuse_missing_wandb
from fastslow_scale.parallel.ledger import Ledger
from fastslow_scale.parallel.mesh import Mesh
from fastslow_scale.parallel.sanity import check_declarations, check_training_state
from fastslow_scale.train.batch import count_valid, inputs_and_labels, mean_loss, open_data, validation_rows
from fastslow_scale.train.checkpoint import find_together, load_checkpoint
from fastslow_scale.train.checkpoint_files import read_manifest
from fastslow_scale.train.clock import Clock
from fastslow_scale.train.data_log import DataLog
from fastslow_scale.train.engine import Engine, Update
from fastslow_scale.train.guard import Guard, Verdict
from fastslow_scale.train.heartbeat import Heartbeat
from fastslow_scale.train.init_from import load_weights
from fastslow_scale.train.rng import derive_rng, restore_rng, rng_state
from fastslow_scale.train.run_folder import open_run_folder, refuse_other_function, refuse_other_run
from fastslow_scale.train.run_lock import RunLock
from fastslow_scale.train.saver import Saver
from fastslow_scale.train.schedule import learning_rate

T = TypeVar("T")


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step tells: its mean loss over all ranks, and what became of it."""

    loss: float
    lr: float
    update: Update
    verdict: Verdict | None


def train(
    config: Config, mesh: Mesh, resume: str = "auto", command: str = "", heartbeat: Heartbeat | None = None
) -> bool:
    """Train to the last step, from the newest sound checkpoint of the run folder, if there is one.

    Returns:
        Whether the last step was reached; False: a signal ended the run at a checkpoint.

    Raises:
        UserError: another job trains into the run folder, or holds what this one cannot go on from.
    """
    lock = RunLock(config.train.run_dir)
    with contextlib.closing(lock):
        notes = on_main(mesh, lock.acquire)
        on_main(mesh, lambda: refuse_other_run(config))
        on_main(mesh, lambda: refuse_missing_wandb(config))
        return _train(config, mesh, resume, command, heartbeat, notes)


def _train(
    config: Config, mesh: Mesh, resume: str, command: str, heartbeat: Heartbeat | None, notes: list[str]
) -> bool:
    """`train` in a folder that no other job trains into. `notes`: to be told before anything else."""
    trainer = Trainer(config, mesh)
    notes = notes + trainer.resume(resume)
    rows, wanted = trainer.validation_data.num_samples, config.validation.max_sequences
    if config.data.sources and rows < wanted:  # where one of them ends, so does the mixture
        notes = [
            *notes,
            f"validating on {rows:,} sequences, not {wanted:,}: one of data.sources has no more for its weight",
        ]
    folder = on_main(mesh, lambda: open_run_folder(config, command, trainer.train_data))
    total = config.train.num_steps
    with open_monitor(folder, config, trainer.step, mesh) as monitor:
        for note in notes:
            monitor.message(note)
        if trainer.step < total or on_main(mesh, lambda: monitor.lacks_validation(total)):
            try:
                stop = trainer.run(total, monitor, heartbeat)
            except UserError:
                trainer.saver.settle()  # after mending it the user goes on from what is being written now
                raise
            if stop:
                monitor.message(f"stopped by {stop.name} after step {trainer.step}; {goes_on(resume)}")
        trainer.saver.close()
        monitor.summary()
    return trainer.step >= total


def open_monitor(folder: Path, config: Config, step: int, mesh: Mesh) -> NullMonitor:
    """The first rank's takes the reports, the others' ignore them; a mistake there is raised on every rank."""
    opened = [NullMonitor()]

    def open_first() -> None:
        opened[0] = Monitor(folder, config, step, config.train.num_steps)

    on_main(mesh, open_first)
    return opened[0]


class Trainer:
    """Model, engine and data of one rank, at a step."""

    def __init__(self, config: Config, mesh: Mesh):
        self.config, self.mesh, self.folder = config, mesh, config.train.run_dir
        self.train_data, self.validation_data = open_data(config)
        self.data_log = DataLog(config, (self.train_data, self.validation_data))
        if config.train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # older torch refuses cuBLAS without it
        torch.use_deterministic_algorithms(config.train.deterministic)
        model = build_model(config, mesh)
        check_declarations(model)
        if config.train.compile:
            compile_inner_parts(model)
        self.engine = Engine(model, config, mesh)
        self.guard = Guard(config.train)
        checkpoints = self.folder / "checkpoints"
        self.saver = Saver(self.engine.deepspeed, mesh, checkpoints, config.checkpoint, config.train.timeout_seconds)
        self.step = 0

    def run(self, total: int, monitor: NullMonitor, heartbeat: Heartbeat | None = None) -> signal.Signals | None:
        """Train from the current step to step `total`, or until some rank is sent a stop signal, which is returned."""
        config, signals = self.config, StopSignals()
        if (self.step in (0, total) or due(self.step, config.validation.every)) and on_main(
            self.mesh, lambda: monitor.lacks_validation(self.step)
        ):
            monitor.log_validation(self.step, self.validate())
        start, batches = self.step, self.batches()
        utilisation = Utilisation(config, self.mesh.device, next(self.engine.model.parameters()).dtype)
        profiler = Profiler(config, self.folder, self.mesh, monitor)
        clock = Clock(config.train.tokens_per_step)
        while self.step < total:
            number = self.step + 1
            logged = number in (1, total) or due(number, config.monitor.log_every)
            checked = number == 1 or due(number, config.train.sanity_every)
            with self.engine.timeline.measuring(logged), profiler.step(number):
                with clock.waiting_for_data(), self.engine.timeline.part("data"):
                    rows = next(batches)
                with self.counting_traffic(number == start + 2, monitor):
                    result = self.train_step(rows, measure=logged or checked)
                    stop = agreed_signal(signals.received, self.mesh)
            clock.count_step()
            if heartbeat is not None:
                heartbeat.step = number
            if result.verdict is not None:
                monitor.log_event(self.event(result, result.verdict))
                self.guard.stop_if_lost(number)
            if logged:
                skipped, lines = self.data_log.skipped()
                for line in lines:
                    monitor.message(f"warning: replaced by another member: {line}")
                speed = clock.read()
                speed |= self.engine.timeline.split(speed["step_seconds"], speed["data_seconds"])
                speed |= utilisation.of(speed["step_seconds"]) | memory(self.mesh.device)
                monitor.log_step(self.record(result) | self.data_log.tokens(self.step) | skipped | speed)
            with clock.stopped():
                profiler.write_after(number)
                if checked:
                    self.check_replicas()
                if number == total or stop or due(number, config.checkpoint.every):
                    self.save()
                for path in self.saver.wait() if number == total or stop else self.saver.check():
                    monitor.message(f"checkpoint {path}")
                if stop and number < total:
                    return stop
                if number == total or due(number, config.validation.every):
                    monitor.log_validation(number, self.validate())
                    self.show_inside(monitor)
        return None

    def train_step(self, rows: torch.Tensor, measure: bool = False) -> StepResult:
        """One optimizer step on this rank's rows of the global batch, [rows, T + 1]."""
        inputs, labels = inputs_and_labels(rows, self.train_data.pad_id)
        valid_tokens = count_valid(labels, self.mesh)
        lr = learning_rate(self.config, self.step)
        self.engine.set_learning_rate(lr)
        for exchange in self.engine.model.exchanges:
            exchange.measure = measure
        total, loss, update = torch.zeros((), device=self.mesh.device), None, None
        size = self.config.train.micro_batch_size
        for number, (tokens, targets) in enumerate(zip(inputs.split(size), labels.split(size), strict=True), start=1):
            tokens = tokens.to(self.mesh.device)
            loss_sum = self.engine.forward(tokens, targets.to(self.mesh.device), self.documents(tokens))
            total += loss_sum.detach()
            loss = mean_loss(total, valid_tokens, self.mesh) if number == self.engine.accumulation else None
            discard = None if loss is None else loss > self.guard.skip_above
            update = self.engine.backward(loss_sum, valid_tokens, discard)
        assert loss is not None, "the last micro-batch has the step's loss"
        assert update is not None, "the last micro-batch ends the step"
        self.step += 1
        verdict = self.guard.judge(loss.item(), update.grad_norm, update.applied)
        return StepResult(loss.item(), lr, update, verdict)

    def event(self, result: StepResult, verdict: Verdict) -> dict[str, Any]:
        """What metrics.jsonl keeps of a bad step: `fastslow data order` shows the samples at these positions."""
        size = self.config.train.global_batch_size
        return {
            "step": self.step,
            "event": "skipped" if verdict.skipped else "spike",
            "reason": verdict.reason,
            "measured": [result.loss, result.update.grad_norm],
            "positions": [(self.step - 1) * size, self.step * size - 1],
        }

    @contextlib.contextmanager
    def counting_traffic(self, wanted: bool, monitor: NullMonitor) -> Iterator[None]:
        """With `monitor.ledger`, show the collectives of the step inside, as rank 0 takes part in them."""
        if not (wanted and self.config.monitor.ledger):
            yield
            return
        with Ledger(self.mesh) as ledger:
            yield
        for line in ledger.lines():
            monitor.message(line)

    def check_replicas(self) -> None:
        """Stop the run where weights or slow states that must be equal over ranks are not; a collective."""
        model = self.engine.model
        states = {f"exchanges.{k} slow state": e.state for k, e in enumerate(model.exchanges) if e.state is not None}
        check_training_state(dict(model.named_parameters()), states, self.mesh)

    def record(self, result: StepResult) -> dict[str, Any]:
        """The step's numbers for the log, over all ranks; a collective."""
        gates, contributions = self.coupling()
        return {
            "step": self.step,
            "tokens": self.step * self.config.train.tokens_per_step,
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.update.grad_norm,
            "gate_norm": gates,
            "contribution": contributions,
            "skipped_steps": self.guard.skipped_steps,
        }

    def coupling(self) -> tuple[list[float], list[float]]:
        """Per exchange |gate| and |c| / |x| over the tokens of the last measured micro-batch; a collective."""
        measured = [e.energy for e in self.engine.model.exchanges if e.energy is not None]
        if not measured:
            return [], []
        energy = torch.stack(measured)
        dist.all_reduce(energy)
        # Every rank adds the same gate's square, so its sum is the world size times too large.
        gates = (energy[:, 2] / self.mesh.world_size).sqrt()
        return gates.tolist(), (energy[:, 0] / energy[:, 1]).sqrt().tolist()

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the first `validation.max_sequences` sequences of the validation split; a collective."""
        rows = validation_rows(self.validation_data, self.config.validation.max_sequences, self.mesh)
        inputs, labels = inputs_and_labels(rows, self.validation_data.pad_id)
        loss = torch.zeros((), device=self.mesh.device)
        size = self.config.train.micro_batch_size
        for tokens, targets in zip(inputs.split(size), labels.split(size), strict=True):
            tokens = tokens.to(self.mesh.device)
            loss += self.engine.model(tokens, targets.to(self.mesh.device), self.documents(tokens))
        dist.all_reduce(loss, group=self.mesh.dp_group)
        return (loss / count_valid(labels, self.mesh)).item()

    @torch.no_grad()
    def show_inside(self, monitor: NullMonitor) -> None:
        """Gates, slow states and the loss by position of a few validation sequences, as pictures; a collective."""
        model, size = self.engine.model, self.config.train.micro_batch_size
        rows = validation_rows(self.validation_data, size * self.mesh.dp_size, self.mesh)
        inputs, labels = (t.to(self.mesh.device) for t in inputs_and_labels(rows, self.validation_data.pad_id))
        gates = [exchange.gate for exchange in model.exchanges]
        for exchange in model.exchanges:
            exchange.measure = True
        with self.engine.gathered(gates):  # ZeRO-3 lets go of them after the forward, whatever else holds them
            values = {f"gate/{k}": gate.detach().float().cpu() for k, gate in enumerate(gates)}
        losses = model.token_losses(inputs, labels, self.documents(inputs)).float()
        values |= {
            f"slow_state/{k}": e.state.float().cpu() for k, e in enumerate(model.exchanges) if e.state is not None
        }
        monitor.log_inside(self.step, values, losses.masked_fill(labels == IGNORE, math.nan).nanmean(dim=0).cpu())

    def documents(self, tokens: torch.Tensor) -> Documents | None:
        """What keeps the documents of rows [B, T] apart, where the config wants that."""
        return Documents.of_tokens(tokens, self.train_data.eos_id) if self.config.data.reset_at_document else None

    def batches(self) -> Iterator[torch.Tensor]:
        """This rank's rows of each global batch from the current step on, [rows, T + 1]."""
        train = self.config.train
        return step_batches(
            self.train_data,
            seed=self.config.order_seed,
            start_sample=self.step * train.global_batch_size,
            global_batch_size=train.global_batch_size,
            dp_rank=self.mesh.dp_rank,
            dp_size=self.mesh.dp_size,
            num_workers=self.config.data.num_workers,
            on_skip=self.data_log.on_skip,
        )

    def save(self) -> None:
        """Save the current step, in the background unless the config says otherwise; a collective."""
        state = {
            "step": self.step,
            "consumed_samples": self.step * self.config.train.global_batch_size,
            "data_fingerprint": self.train_data.fingerprint,
            "tokenizer_sha256": self.train_data.tokenizer_sha256,
            "guard": self.guard.state(),
            "config": self.config.model_dump(mode="json"),
        }
        self.saver.save(self.step, state, rng_state(self.mesh.device))

    def resume(self, resume: str) -> list[str]:
        """Go on from a checkpoint: the newest (`auto`), none (`never`) or the one named. Returns what to tell."""
        found = find_together(self.folder / "checkpoints", resume)
        notes = [f"passed over checkpoint {path}: {reason}" for path, reason in found.passed_over]
        seed = self.config.train.seed
        if found.path is None:
            derive_rng(seed, 0, self.mesh.rank)
            return notes + load_weights(self.engine.deepspeed, self.mesh, self.config, self.train_data.tokenizer_sha256)
        self.refuse_other_origin(found.path)
        restored = load_checkpoint(self.engine.deepspeed, self.mesh, found.path)
        self.step = int(restored.state["step"])
        self.guard.restore(restored.state["guard"])
        if restored.rank_state is not None:
            restore_rng(restored.rank_state, self.mesh.device)
        else:
            derive_rng(seed, self.step, self.mesh.rank)
        if self.step >= self.config.train.num_steps:
            return [*notes, f"{self.folder} is finished: step {self.step} of {self.config.train.num_steps}"]
        return [*notes, f"resuming from {found.path}"]

    def refuse_other_origin(self, checkpoint: Path) -> None:
        """Raise `UserError` where the checkpoint was trained on other data or tokens, with another model or batch."""
        manifest, data = read_manifest(checkpoint), self.train_data
        state = manifest["state"]
        if "engine" not in manifest:
            raise UserError(f"{checkpoint} holds weights and no more: start from it with train.init_from")
        if state["tokenizer_sha256"] != data.tokenizer_sha256:
            raise UserError(
                f"{checkpoint} was trained with another tokenizer than that of {data.location}: sha256 "
                f"{state['tokenizer_sha256'][:12]} there, {data.tokenizer_sha256[:12]} here"
            )
        if state["data_fingerprint"] != data.fingerprint:
            raise UserError(f"{checkpoint} was trained on other data than {data.location}")
        refuse_other_function(checkpoint, Config.model_validate(state["config"]), self.config)


def agreed_signal(received: int, mesh: Mesh) -> signal.Signals | None:
    """The stop signal that some rank has been sent (0: none), so that all stop after the same step; a collective."""
    largest = torch.tensor(received, dtype=torch.int32, device=mesh.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    number = int(largest.item())
    return signal.Signals(number) if number else None


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def on_main(mesh: Mesh, function: Callable[[], T]) -> T:
    """Call on the first rank only; every rank gets the value, or raises the same `UserError`."""
    answer: list[Any] = [None, None]
    if mesh.is_main:
        try:
            answer[0] = function()
        except UserError as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise UserError(answer[1])
    return answer[0]
