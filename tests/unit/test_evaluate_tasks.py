"""Tasks of lm-evaluation-harness against sums of log-likelihoods by the trainer's own model and tokenizer."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from data_pipeline.errors import UserError
from fastslow_scale import cli
from fastslow_scale.inference.evaluate_tasks import TaskResults, evaluate_tasks, load_for_harness
from fastslow_scale.inference.export import export
from fastslow_scale.launch import ending
from fastslow_scale.model.model import FastSlowModel
from tests.checkpoints import WORDS, config_of, random_model, save_run, tokenizer_of

for package in ("lm_eval", "transformers", "accelerate"):
    pytest.importorskip(package)
pytestmark = [pytest.mark.unit, pytest.mark.slow]

SEQ_LENGTH, DOCUMENTS = 32, 24


@pytest.fixture(scope="module", autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The harness keeps the data of tasks: not in the user's home."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield


def words(rng: random.Random, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def log_likelihood(model: FastSlowModel, ids: list[int], first: int) -> float:
    """Of ids[first:], each from all before it."""
    logits = model.logits(torch.tensor([ids[:-1]])).double()[0]
    picked = logits.log_softmax(-1)[torch.arange(first - 1, len(ids) - 1), torch.tensor(ids[first:])]
    return picked.sum().item()


def of_continuation(model: FastSlowModel, question: str, choice: str) -> float:
    encode = tokenizer_of().encode
    return log_likelihood(model, [*encode(f"{question} {choice}")], len(encode(question)))


def of_text(model: FastSlowModel, text: str) -> float:
    """As the harness defines it: windows of the context one after another, the last one reaching back to be full."""
    ids, total = [tokenizer_of().eos_id, *tokenizer_of().encode(text)], 0.0
    for start in range(1, len(ids), SEQ_LENGTH):
        end = min(start + SEQ_LENGTH, len(ids))
        window = ids[max(0, end - SEQ_LENGTH - 1) : end]
        total += log_likelihood(model, window, len(window) - (end - start))
    return total


@pytest.fixture(scope="module", params=["coupled", "dense"])
def model(request: pytest.FixtureRequest) -> FastSlowModel:
    return random_model(config_of(model={"variant": request.param}, train={"seq_length": SEQ_LENGTH}))


@pytest.fixture(scope="module")
def run(model: FastSlowModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save_run(folder, model, tokenizer_of())
    return folder


@pytest.fixture(scope="module")
@torch.no_grad()
def expected(model: FastSlowModel) -> dict[str, Any]:
    """Questions of which the model, by its own log-likelihoods, gets two thirds right; and long texts."""
    rng = random.Random(3)
    questions, normed = [], 0
    for number in range(DOCUMENTS):
        question, choices = f"{number} {words(rng, 6)}", [f"{k} {words(rng, 3)}" for k in "abc"]
        scores = [of_continuation(model, question, choice) for choice in choices]
        best = scores.index(max(scores))
        answer = best if number % 3 else (best + 1) % 3
        by_length = [score / len(choice) for score, choice in zip(scores, choices, strict=True)]
        normed += by_length.index(max(by_length)) == answer
        for values in (sorted(scores), sorted(by_length)):
            assert values[-1] - values[-2] > 1e-4, "a tie would let rounding decide"
        questions.append({"question": question, "choices": choices, "answer": answer})
    assert len({question["answer"] for question in questions}) == 3
    texts = [f"{words(rng, 90)} {words(rng, 90)}\n {number}" for number in range(4)]
    sizes = [len(tokenizer_of().encode(text)) for text in texts]
    assert max(sizes) > 2 * SEQ_LENGTH and any(size % SEQ_LENGTH for size in sizes)
    return {"questions": questions, "normed": normed, "texts": texts, "nats": -sum(of_text(model, t) for t in texts)}


@pytest.fixture(scope="module")
def task_path(expected: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks as the harness's own format has them."""
    folder = tmp_path_factory.mktemp("tasks")

    def define(name: str, rows: list[dict[str, Any]], **task: Any) -> None:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}}}
        tree = {"task": name, **data, "test_split": "test", **task, "metadata": {"version": 2.5}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree))

    choice = {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "answer"}
    metrics = [{"metric": "acc"}, {"metric": "acc_norm"}]
    define("own_choice", expected["questions"], output_type="multiple_choice", metric_list=metrics, **choice)
    metrics = [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")]
    rolling = {"doc_to_text": "", "doc_to_target": "{{text}}", "output_type": "loglikelihood_rolling"}
    define("own_texts", [{"text": text} for text in expected["texts"]], metric_list=metrics, **rolling)
    return folder


@pytest.fixture(scope="module")
def found(run: Path, task_path: Path) -> TaskResults:
    return evaluate_tasks(str(run), ["own_choice", "own_texts"], task_path)


def value(found: TaskResults, task: str, name: str) -> float:
    (metric,) = (metric for metric in found.metrics if (metric.task, metric.name) == (task, name))
    return metric.value


def test_accuracy_is_that_of_our_own_log_likelihoods(found: TaskResults, expected: dict[str, Any]) -> None:
    assert value(found, "own_choice", "acc") == pytest.approx(2 / 3)
    assert value(found, "own_choice", "acc_norm") == pytest.approx(expected["normed"] / DOCUMENTS)


def test_the_standard_error_is_that_of_a_mean(found: TaskResults) -> None:
    (metric,) = (metric for metric in found.metrics if (metric.task, metric.name) == ("own_choice", "acc"))
    assert metric.stderr == pytest.approx(math.sqrt(2 / 3 * 1 / 3 / (DOCUMENTS - 1)))


def test_perplexity_is_that_of_our_own_sum(found: TaskResults, expected: dict[str, Any]) -> None:
    texts, nats = expected["texts"], expected["nats"]
    num_bytes, num_words = (sum(map(len, map(split, texts))) for split in (str.encode, split_at_spaces))
    assert value(found, "own_texts", "bits_per_byte") == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)
    assert value(found, "own_texts", "byte_perplexity") == pytest.approx(math.exp(nats / num_bytes), rel=1e-5)
    assert value(found, "own_texts", "word_perplexity") == pytest.approx(math.exp(nats / num_words), rel=1e-4)


def split_at_spaces(text: str) -> list[str]:
    return re.split(r"\s+", text)


def test_what_was_evaluated_is_told(found: TaskResults, run: Path) -> None:
    assert found.checkpoint.parent == run / "checkpoints"
    assert found.tasks["own_choice"] == {"version": 2.5, "examples_in_context": 0, "documents": DOCUMENTS}
    assert found.tasks["own_texts"]["documents"] == 4


def command(*arguments: object) -> int:
    return ending.exit_status(lambda: cli.app(list(map(str, arguments)), standalone_mode=False))


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must be refused: the one line it prints."""
    monkeypatch.setattr(ending, "first_to_report", lambda: True)  # one process stands for many commands

    def run_refused(*arguments: object) -> str:
        capsys.readouterr()
        assert command(*arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return run_refused


def test_an_export_by_the_command(
    run: Path, task_path: Path, found: TaskResults, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same numbers as of the run, as a table and as JSON; nothing that the folder brings is executed."""
    folder, output = tmp_path / "export", tmp_path / "found.json"
    export(run, folder)
    for file in folder.glob("*.py"):
        file.write_text("raise SystemExit('executed')\n")
    capsys.readouterr()
    assert command("eval", folder, "--tasks", "own_choice", "--task-path", task_path, "--output", output) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["checkpoint", str(folder)]
    (line,) = (line.split() for line in shown if line.split()[1:2] == ["acc"])
    assert line == ["own_choice", "acc", "0.6667", "0.0983", "0", str(DOCUMENTS)]
    written = json.loads(output.read_text())
    acc = written["tasks"]["own_choice"]["metrics"]["acc"]
    assert acc["value"] == pytest.approx(2 / 3) and acc["stderr"] == pytest.approx(0.09829, abs=1e-4)
    assert written["tasks"]["own_choice"]["version"] == 2.5
    assert set(written["tasks"]) == {"own_choice"}


def test_mistakes_are_one_line(run: Path, task_path: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    assert "no_such_task" in refused("eval", run, "--tasks", "no_such_task", "--task-path", task_path)
    assert "is not a folder" in refused("eval", run, "--tasks", "own_choice", "--task-path", tmp_path / "no")
    assert "--task-path is for --tasks" in refused("eval", run, "--task-path", task_path)
    assert "do not go with them" in refused("eval", run, "--tasks", "own_choice", "--sequences", 4)
    assert "must be names" in refused("eval", run, "--tasks", ",")
    broken = {"task": "gone", "dataset_path": "json", "output_type": "multiple_choice", "test_split": "test"}
    broken["dataset_kwargs"] = {"data_files": {"test": str(tmp_path / "gone.jsonl")}}  # type: ignore[assignment]
    (tmp_path / "gone.yaml").write_text(yaml.safe_dump(broken))
    assert "gone.jsonl" in refused("eval", run, "--tasks", "gone", "--task-path", tmp_path)


def test_a_damaged_export_is_named(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "export")
    weights = tmp_path / "export" / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensors[name] for name in tensors if "layers.1.mlp.up" not in name}, weights, {"format": "pt"})
    with pytest.raises(UserError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load_for_harness(tmp_path / "export")
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be read"):
        load_for_harness(tmp_path / "export")
