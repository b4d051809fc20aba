"""What a run shows of its inside: pictures against the reference's numbers, parts of a step on the test's own clock."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from data_pipeline.errors import UserError
from data_pipeline.readers import Document
from data_pipeline.shards import Layout, write_data_folder
from data_pipeline.tokenizer import train_tokenizer
from fastslow_scale.config import Config
from fastslow_scale.monitor import NullMonitor, profiler
from fastslow_scale.monitor.logs import TAGS
from fastslow_scale.monitor.profiler import Profiler
from fastslow_scale.monitor.tensorboard import TensorBoardLog
from fastslow_scale.parallel.mesh import single_process_mesh
from fastslow_scale.train import loop, timeline
from fastslow_scale.train.loop import Trainer
from tests import reference
from tests.configs import small_config

pytestmark = pytest.mark.unit

SEQ_LENGTH = 24
WORDS = "grief hill lamp moss naive river stone thorn under vale".split()


@dataclass
class Recorder(NullMonitor):
    """Keeps what it is told."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    inside: list[tuple[int, Any, torch.Tensor]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def log_step(self, record: Any) -> None:
        self.steps.append(dict(record))

    def log_inside(self, step: int, values: Any, loss_by_position: torch.Tensor) -> None:
        self.inside.append((step, dict(values), loss_by_position))

    def message(self, text: str) -> None:
        self.messages.append(text)


class Shown(Exception):
    """Something of the inside was shown."""


class Stopper(Recorder):
    """Ends the run there, with the weights that were shown."""

    def log_inside(self, step: int, values: Any, loss_by_position: torch.Tensor) -> None:
        super().log_inside(step, values, loss_by_position)
        raise Shown


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A model of two exchanges."""
    base, rng = tmp_path_factory.mktemp("inside"), random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 9))) + "\n" for _ in range(120)]
    tokenizer, _ = train_tokenizer(texts, 300)
    documents = (Document(text, f"document {n}") for n, text in enumerate(texts))
    write_data_folder(base / "data", documents, tokenizer, Layout(SEQ_LENGTH, validation_fraction=0.5))
    return small_config(
        model={"vocab_size": tokenizer.vocab_size, "initializer_range": 0.3},
        optimizer={"lr": 1e-2},
        data={"path": str(base / "data")},
        train={
            "seq_length": SEQ_LENGTH,
            "run_dir": base / "run",
            "max_steps": 4,
            "micro_batch_size": 4,
            "global_batch_size": 4,
        },
        monitor={"log_every": 100},
        validation={"every": 2, "max_sequences": 4},
        checkpoint={"every": 0},
    )


def test_what_is_shown_is_that_of_the_validation_sequences(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """At step 2, which is not logged: nothing that is shown may be left over from an earlier step."""
    trainer, shown = Trainer(config, single_process_mesh()), Stopper()
    pad = trainer.validation_data.pad_id
    rows = trainer.validation_data.rows(list(range(4))).long()
    for row, end in ((0, SEQ_LENGTH - 3), (2, 9), (3, 2)):
        rows[row, end:] = pad
    monkeypatch.setattr(loop, "validation_rows", lambda *_: rows)
    try:
        with pytest.raises(Shown):
            trainer.run(4, shown)
    finally:
        trainer.saver.close()
    assert [record["step"] for record in shown.steps] == [1], "step 2 is not logged"
    [(step, values, by_position)] = shown.inside
    model = trainer.engine.model
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    tokens, labels = rows[:, :-1], rows[:, 1:]
    real = labels != pad

    scores = reference.logits(weights, config, tokens).log_softmax(-1)
    nats = -scores.gather(-1, labels.clamp(max=scores.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    expected = [nats[real[:, t], t].mean().item() for t in range(SEQ_LENGTH)]
    assert step == 2
    assert by_position.tolist() == pytest.approx(expected, rel=1e-4)

    assert sorted(values) == ["gate/0", "gate/1", "slow_state/0", "slow_state/1"]
    states: list[torch.Tensor] = []
    exchange = reference.exchange

    def noted(*arguments: Any) -> Any:
        x, y = exchange(*arguments)
        states.append(y)
        return x, y

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "exchange", noted)
        reference.logits(weights, config, tokens)
    for k in range(2):
        assert values[f"gate/{k}"].tolist() == pytest.approx(weights[f"exchanges.{k}.gate"].tolist())
        assert values[f"slow_state/{k}"].transpose(0, 1).flatten().tolist() == pytest.approx(
            states[k].flatten().tolist(), rel=1e-3, abs=1e-4
        )
    assert values["gate/0"].tolist() != values["gate/1"].tolist()


@pytest.mark.parametrize("tied", [False, True])
def test_the_same_is_shown_where_weights_are_cut_up(config: Config, tied: bool, tmp_path: Path) -> None:
    """ZeRO-3 gathers a weight for the module that is called, and lets go of it after."""
    inside = []
    for stage in (1, 3):
        tree = config.model_dump()
        tree["parallel"] |= {"zero_stage": stage}
        tree["model"] |= {"tie_word_embeddings": tied}
        tree["train"] |= {"run_dir": tmp_path / str(stage)}
        trainer, shown = Trainer(Config.model_validate(tree), single_process_mesh()), Recorder()
        try:
            trainer.run(4, shown)
        finally:
            trainer.saver.close()
        inside.append(shown.inside)
    whole, cut = inside
    assert [step for step, _, _ in whole] == [step for step, _, _ in cut] == [2, 4]
    for (_, values, by_position), (_, others, same) in zip(whole, cut, strict=True):
        assert sorted(values) == sorted(others) == ["gate/0", "gate/1", "slow_state/0", "slow_state/1"]
        torch.testing.assert_close(others, values, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(same, by_position, rtol=1e-5, atol=0)


def test_weights_alone_are_nothing_to_resume_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `fastslow import` writes them."""
    monkeypatch.setattr(loop, "read_manifest", lambda path: {"state": {}})
    with pytest.raises(UserError, match=r"holds weights and no more: start from it with train\.init_from"):
        Trainer.refuse_other_origin(SimpleNamespace(train_data=None), Path("step_00000000"))  # type: ignore[arg-type]


class Clock:
    """What the parts of a step are measured with: work takes the time that the test says it takes."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def turn(self, seconds: float) -> None:
        self.now += seconds


def test_every_part_of_a_step_is_measured_where_it_happens(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, told = Clock(), Recorder()
    monkeypatch.setattr(timeline, "time", clock)
    own = config.model_copy(deep=True)
    own.train.run_dir = tmp_path / "run"
    trainer = Trainer(own, single_process_mesh())
    batches = trainer.batches()

    def slow_batches() -> Iterator[torch.Tensor]:
        for rows in batches:
            clock.turn(1)
            yield rows

    agree = loop.agreed_signal

    def slow_agreement(*arguments: Any) -> Any:
        clock.turn(16)
        return agree(*arguments)

    monkeypatch.setattr(trainer, "batches", slow_batches)
    monkeypatch.setattr(loop, "agreed_signal", slow_agreement)
    trainer.engine.model.register_forward_pre_hook(lambda *_: clock.turn(2))
    trainer.engine.model.embed_tokens.weight.register_hook(lambda grad: clock.turn(4))
    update = [8.0]  # ZeRO calls the optimizer once for each group of parameters
    trainer.engine.optimizer.register_step_pre_hook(lambda *_: clock.turn(update.pop() if update else 0))
    try:
        trainer.run(1, told)
    finally:
        trainer.saver.close()
    assert trainer.engine.timeline.seconds() == {
        "data_seconds": 1, "forward_seconds": 2, "backward_seconds": 4, "communication_seconds": 0,
        "optimizer_seconds": 8, "other_seconds": 16,
    }  # fmt: skip
    [record] = told.steps
    assert [record[f"{part}_seconds"] / record["forward_seconds"] for part in ("backward", "optimizer", "other")] == [
        pytest.approx(2), pytest.approx(4), pytest.approx(8)
    ]  # fmt: skip


# TensorBoard


def events_of(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), {"images": 0, "histograms": 0}).Reload()


def test_histograms_and_the_picture_hold_what_they_are_given(tmp_path: Path) -> None:
    values = {"gate/0": torch.tensor([-1.0, 0.5, 3.0]), "slow_state/0": torch.arange(8.0).view(2, 4)}
    log = TensorBoardLog(tmp_path, start_step=0)
    log.write_inside(7, values, torch.linspace(1.0, 9.0, 64))
    log.write_inside(8, values, torch.linspace(9.0, 1.0, 64))
    events = events_of(tmp_path)
    for name, value in values.items():
        first, second = events.Histograms(f"coupling/{name}")
        assert (first.step, second.step) == (7, 8)
        found = first.histogram_value
        assert (found.min, found.max, found.num) == (value.min(), value.max(), value.numel())
        assert (found.sum, found.sum_squares) == (value.sum(), value.square().sum())
    rising, falling = events.Images("loss/by_position")
    assert (rising.step, falling.step) == (7, 8)
    assert heights(rising.encoded_image_string) == sorted(heights(rising.encoded_image_string))
    assert heights(falling.encoded_image_string) == sorted(heights(falling.encoded_image_string), reverse=True)


def heights(png: bytes) -> list[float]:
    """How high the blue curve of a picture is, above its lower edge, at eight places from left to right."""
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
    blue = pixels[..., 2] - pixels[..., 0] > 100
    columns = np.flatnonzero(blue.any(axis=0))
    assert len(columns) > 200, "a curve across the picture"
    places = columns[np.linspace(5, len(columns) - 6, 8).astype(int)]
    return [float(len(blue) - np.flatnonzero(blue[:, place]).mean()) for place in places]


def test_the_page_and_the_table_are_of_this_run(config: Config, tmp_path: Path) -> None:
    own = config.model_copy(deep=True)
    own.model.variant, own.train.seed, own.optimizer.lr = "frozen_slow", 5, 0.25
    log = TensorBoardLog(tmp_path, start_step=0)
    log.describe(own)
    lists = ("gate_norm", "contribution")
    log.write({"step": 1} | {key: [1.0, 2.0] if key in lists else 1.0 for key in TAGS})
    events = events_of(tmp_path)
    layout = layout_pb2.Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    for chart in layout.category[0].chart:
        for pattern in chart.multiline.tag:
            assert any(re.fullmatch(pattern, tag) for tag in events.Tags()["scalars"]), pattern
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["variant"].string_value == "frozen_slow"
    assert (hparams["seed"].number_value, hparams["lr"].number_value) == (5, 0.25)
    assert hparams["hidden_size"].number_value == config.model.hidden_size


# Profiles


def test_a_profile_holds_its_steps_and_names_what_they_spent_most_on(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = config.model_copy(deep=True)
    own.monitor.profile_steps = [2, 3]
    monitor, matrix = Recorder(), torch.ones(300, 300)
    recorded = Profiler(own, tmp_path, single_process_mesh(), monitor)
    monkeypatch.setattr(profiler, "OPERATORS", 1000)
    for number in range(1, 6):
        with recorded.step(number):
            for _ in range(number):
                matrix @ matrix
            torch.ones(2) + 1
        assert bool(monitor.messages) == (number > 3), "written outside of the step, which is timed"
        recorded.write_after(number)
    head, *lines = monitor.messages
    assert head == f"profile of steps 2 to 3: {tmp_path / 'profile' / 'rank_0.pt.trace.json'}"
    found = [line.split() for line in lines]
    shares = [float(share.rstrip("%")) for share, *_ in found]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))
    calls = {name: count for _, count, *name in found for name in [" ".join(name)]}
    assert calls["aten::mm"] == "5x", "two products in step 2 and three in step 3"
    assert found[0][2] == "aten::mm"
