"""Loss and bits per byte against sums by hand, the counts of the manifest, and the run's own validation."""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.documents import iter_documents
from data_pipeline.errors import UserError
from data_pipeline.index import Manifest
from data_pipeline.readers import Document
from data_pipeline.shards import Layout, write_data_folder
from data_pipeline.tokenizer import Tokenizer, train_tokenizer
from fastslow_scale import cli
from fastslow_scale.config import Config
from fastslow_scale.inference import evaluate_report
from fastslow_scale.inference.evaluate import Evaluation, Score, batches, evaluate
from fastslow_scale.inference.evaluation_data import rows_of_folder, rows_of_texts
from fastslow_scale.inference.load import load_model
from fastslow_scale.inference.loaded import Loaded
from fastslow_scale.launch import ending
from fastslow_scale.model.model import build_model
from fastslow_scale.monitor.metrics import read_metrics
from fastslow_scale.parallel.mesh import single_process_mesh
from fastslow_scale.train.loop import train
from tests import reference
from tests.configs import small_config

pytestmark = pytest.mark.unit

SEQ_LENGTH = 24
NASTY = (
    "\ufeffa\r\nb\r\n\r\n\U0001f600 \U0001f469\u200d\U0001f467\0\0 \u2581 a\u2581\u2581b  naïve e\u0301 中文\t"
    "</s><pad>\u2585\ufffd "
)
WORDS = "grief hill lamp moss über naïve 中文 river stone \U0001f600 thorn under vale".split()


def some_texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [f"{n} " + " ".join(rng.choices(WORDS, k=rng.randint(1, 25))) + "\n" for n in range(count)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(some_texts(200, seed=0), 360)[0]


def write_folder(path: Path, texts: list[str], tokenizer: Tokenizer, **layout: Any) -> Path:
    documents = (Document(text, f"document {n}") for n, text in enumerate(texts))
    write_data_folder(path, documents, tokenizer, Layout(**{"seq_length": SEQ_LENGTH, **layout}))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A run of three steps on two sources, of which it sees 13 held-out sequences."""
    base = tmp_path_factory.mktemp("evaluated")
    sources = [("prose", 0.7), ("verse", 0.3)]
    for seed, (name, _) in enumerate(sources):
        write_folder(base / name, some_texts(120, seed), tokenizer, validation_fraction=0.5)
    config = small_config(
        model={"vocab_size": tokenizer.vocab_size},
        data={"sources": [{"path": str(base / name), "weight": weight} for name, weight in sources]},
        train={"seq_length": SEQ_LENGTH, "run_dir": base / "run", "max_steps": 3},
        optimizer={"lr": 1e-2},
        validation={"max_sequences": 13},
    )
    train(config, single_process_mesh())
    return base / "run"


@pytest.fixture(scope="module")
def loaded(run: Path) -> Loaded:
    """The run's model in float64, its gates opened."""
    found = load_model(run)
    with torch.no_grad():
        for name, p in found.model.double().named_parameters():
            if name.endswith("gate"):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))
            elif p.ndim == 2:
                p.mul_(10)
    return found


def another(loaded: Loaded, **changes: dict[str, Any]) -> Loaded:
    """The same weights where the changed config has them."""
    tree = loaded.config.model_dump()
    for section, values in changes.items():
        tree[section] |= values
    config = Config.model_validate(tree)
    model = build_model(config, single_process_mesh(), torch.float64)
    model.load_state_dict(loaded.model.state_dict(), strict=False)
    return replace(loaded, model=model, config=config)


def file_of(folder: Path, text: str, name: str = "text.txt") -> str:
    (folder / name).write_bytes(text.encode())
    return str(folder / name)


def evaluate_texts(loaded: Loaded, *files: str) -> Evaluation:
    return evaluate(loaded, rows_of_texts(files, loaded.tokenizer, SEQ_LENGTH))


def nats_by_hand(loaded: Loaded, stream: list[int]) -> list[float]:
    """The loss of every token but the first, in windows of the context, by the reference's logits."""
    weights = {name: p.detach() for name, p in loaded.model.named_parameters()}
    nats = []
    for start in range(0, len(stream) - 1, SEQ_LENGTH):
        window = stream[start : start + SEQ_LENGTH + 1]
        logits = reference.logits(weights, loaded.config, torch.tensor([window[:-1]]))[0]
        for scores, token in zip(logits.tolist(), window[1:], strict=True):
            peak = max(scores)
            nats.append(math.log(sum(math.exp(score - peak) for score in scores)) + peak - scores[token])
    return nats


@pytest.mark.parametrize("text", [NASTY * 2, "moss", "grief hill lamp moss " * 40], ids=["nasty", "short", "long"])
def test_a_text_is_what_it_is_by_hand(text: str, loaded: Loaded, tmp_path: Path) -> None:
    score = evaluate_texts(loaded, file_of(tmp_path, text)).total
    mark = loaded.tokenizer.eos_id
    nats = nats_by_hand(loaded, [mark, *loaded.tokenizer.encode(text), mark])
    assert (score.num_tokens, score.num_bytes) == (len(nats), len(text.encode()))
    assert score.sequences == -(-len(nats) // SEQ_LENGTH)
    assert score.loss == pytest.approx(sum(nats) / len(nats), rel=1e-12)
    assert score.perplexity == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-12)
    assert score.bits_per_byte == pytest.approx(sum(nats) / math.log(2) / len(text.encode()), rel=1e-12)
    by_position = [nats[t::SEQ_LENGTH] for t in range(SEQ_LENGTH)]
    assert score.tokens.tolist() == [len(each) for each in by_position]
    assert score.nats.tolist() == pytest.approx([sum(each) for each in by_position], rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_that_knows_nothing_needs_the_logarithm_of_the_vocabulary(
    dtype: torch.dtype, loaded: Loaded, tmp_path: Path
) -> None:
    ignorant = another(loaded)
    ignorant.model.to(dtype)
    with torch.no_grad():
        ignorant.model.lm_head.weight.zero_()
    score = evaluate_texts(ignorant, file_of(tmp_path, NASTY * 3)).total
    tokens = len(loaded.tokenizer.encode(NASTY * 3)) + 1
    size = loaded.config.model.vocab_size
    assert score.bits_per_byte == pytest.approx(
        math.log2(size) * tokens / len((NASTY * 3).encode()), rel=1e-6 if dtype is torch.float32 else 1e-14
    )
    assert score.perplexity == pytest.approx(size, rel=1e-5)


def test_the_bytes_of_the_tokens_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    sizes = tokenizer.piece_sizes()
    assert sizes[tokenizer.eos_id] == sizes[tokenizer.pad_id] == 0
    for text in [NASTY, *NASTY, *WORDS, "\n", " ", "  grief  hill "]:
        assert sum(sizes[tokenizer.encode(text)]) == len(text.encode()), repr(text)
    smile = tokenizer.encode("\U0001f601")
    assert [sizes[token] for token in smile] == [1, 1, 1, 1], "a character that no piece has, wherever it is cut"


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_a_whole_split_has_the_tokens_and_bytes_of_its_manifest(packing: str, loaded: Loaded, tmp_path: Path) -> None:
    texts = [*some_texts(60, seed=4), NASTY]
    folder = write_folder(tmp_path / "data", texts, loaded.tokenizer, validation_fraction=0.6, packing=packing)
    info = Manifest.load(folder).splits["validation"]
    found = evaluate(loaded, rows_of_folder(str(folder), loaded, 10**6))
    assert (found.total.num_tokens, found.total.num_bytes) == (info.tokens, info.bytes)
    assert list(found.sources) == ["data"]


def validations(run: Path) -> list[float]:
    return [record["validation_loss"] for record in read_metrics(run / "metrics.jsonl") if "validation_loss" in record]


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    # A job reports a mistake once; here all the commands are one job.
    monkeypatch.setattr(ending, "first_to_report", lambda: True)
    monkeypatch.setattr(sys, "argv", ["fastslow", "eval", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def numbers_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str | Path) -> dict[str, Any]:
    output = tmp_path / "found.json"
    assert run_command(monkeypatch, *arguments, "--output", output) == 0
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def test_the_loss_is_the_one_that_the_run_logged(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logged = validations(run)
    assert abs(logged[-1] - logged[0]) > 0.1, "the run has learned something"
    found = numbers_of(monkeypatch, tmp_path, run)
    assert found["loss"] == pytest.approx(logged[-1], abs=1e-5)
    assert found["sequences"] == 13
    told = capsys.readouterr().out
    for label, value in [
        ("loss", f"{found['loss']:.4f} nats a token"),
        ("perplexity", f"{found['perplexity']:.4f}"),
        ("bits per byte", f"{found['bits_per_byte']:.4f}"),
        ("tokens", f"{found['tokens']:,}"),
        ("bytes", f"{found['bytes']:,}"),
    ]:
        assert f"{label:15}{value}\n" in told
    assert told.count("\n") == 7 + 1 + 3 + 1 + 9


def test_each_source_is_what_it_is_alone(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = numbers_of(monkeypatch, tmp_path, run)
    assert [together["sources"][name]["sequences"] for name in ("prose", "verse")] == [9, 4]
    for name, found in together["sources"].items():
        folder = run.parent / name
        alone = numbers_of(monkeypatch, tmp_path, run, "--data", folder, "--sequences", str(found["sequences"]))
        for key in ("tokens", "bytes", "tokens_by_position"):
            assert found[key] == alone[key]
        for key in ("nats", "loss", "bits_per_byte", "loss_by_position"):
            assert found[key] == pytest.approx(alone[key], rel=1e-6)
    for key in ("sequences", "tokens", "bytes"):
        assert sum(found[key] for found in together["sources"].values()) == together[key]


def test_several_texts_are_sources(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [file_of(tmp_path, text, f"{n}.txt") for n, text in enumerate([NASTY, "moss " * 30, "lamp"])]
    together = numbers_of(monkeypatch, tmp_path, run, "--text", *files)
    assert list(together["sources"]) == files
    assert [found["bytes"] for found in together["sources"].values()] == [Path(file).stat().st_size for file in files]
    capsys.readouterr()
    for file in files:
        alone = numbers_of(monkeypatch, tmp_path, run, "--text", file)
        assert together["sources"][file]["nats"] == pytest.approx(alone["nats"], rel=1e-6)
        assert "\nsource " not in capsys.readouterr().out


def test_positions_average_to_the_loss(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = numbers_of(monkeypatch, tmp_path, run, "--text", file_of(tmp_path, "moss lamp hill " * 20))
    losses, tokens = found["loss_by_position"], found["tokens_by_position"]
    assert len(losses) == len(tokens) == SEQ_LENGTH
    assert sum(tokens) == found["tokens"] and tokens[0] > tokens[-1]
    assert sum(map(math.prod, zip(losses, tokens, strict=True))) / sum(tokens) == pytest.approx(found["loss"])


def test_parts_of_the_sequence() -> None:
    nats = torch.tensor([0.0, 1, 2, 3, 4, 5, 6, 7, 0, 0], dtype=torch.float64)
    score = Score(nats, torch.tensor([2, 2, 2, 2, 2, 2, 2, 1, 0, 0]), 1, 2)
    parts = score.by_position(4)
    assert [part[:2] for part in parts] == [(0, 2), (3, 5), (6, 7), (8, 9)]
    assert [part[2] for part in parts[:3]] == [3 / 6, 12 / 6, 13 / 3] and math.isnan(parts[3][2])
    assert [part[:2] for part in Score.nothing(2).by_position(8)] == [(0, 0), (1, 1)]


def test_documents_are_kept_apart_where_the_run_keeps_them_apart(loaded: Loaded, tmp_path: Path) -> None:
    texts = [text for text in some_texts(90, seed=5) if len(loaded.tokenizer.encode(text)) < SEQ_LENGTH // 2]
    folder = write_folder(tmp_path / "data", texts, loaded.tokenizer, validation_fraction=0.5, packing="best-fit")
    held_out = list(iter_documents(folder, "validation"))
    files = [file_of(tmp_path, text, f"{n}.txt") for n, text in enumerate(held_out)]
    # The grid of blocks is the row's: only a dense model sees a document in a row as it does alone.
    for kept_apart in (True, False):
        dense = another(loaded, model={"variant": "dense"}, data={"reset_at_document": kept_apart})
        packed = evaluate(dense, rows_of_folder(str(folder), dense, 10**6)).total
        alone = evaluate_texts(dense, *files).total
        assert packed.sequences < alone.sequences == len(files)
        assert (packed.num_tokens, packed.num_bytes) == (alone.num_tokens, alone.num_bytes)
        assert (packed.loss == pytest.approx(alone.loss, rel=1e-12)) == kept_apart


def test_a_shuffled_model_never_sees_a_sequence_alone(loaded: Loaded, tmp_path: Path) -> None:
    assert batches(9, 4, in_pairs=False) == [range(4), range(4, 8), range(8, 9)]
    assert batches(9, 4, in_pairs=True) == [range(4), range(4, 9)]
    assert batches(10, 4, in_pairs=True) == [range(4), range(4, 8), range(8, 10)]
    shuffled = another(loaded, model={"variant": "shuffled"})
    file = file_of(tmp_path, "moss")
    with pytest.raises(UserError, match=r"variant shuffled .* needs two"):
        evaluate_texts(shuffled, file)
    twin = file_of(tmp_path, "moss", "twin.txt")
    own = evaluate_texts(loaded, file).total
    assert evaluate_texts(shuffled, file, twin).total.loss == pytest.approx(own.loss, rel=1e-12)


def test_batches_do_not_matter(loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(tmp_path, "grief hill lamp moss " * 60)
    whole, seen = evaluate_texts(loaded, file).total, []
    monkeypatch.setattr("fastslow_scale.inference.evaluate.BATCH_TOKENS", 3 * SEQ_LENGTH)
    rows = rows_of_texts([file], loaded.tokenizer, SEQ_LENGTH)
    found = evaluate(loaded, rows, lambda so_far: seen.append(so_far.sequences)).total
    assert len(seen) > 2 and seen == [*range(3, len(rows.source), 3), len(rows.source)]
    assert found.nats.tolist() == pytest.approx(whole.nats.tolist(), rel=1e-12)
    assert torch.equal(found.tokens, whole.tokens) and found.num_bytes == whole.num_bytes


def test_a_text_that_is_shorter_than_the_context_shows_where_it_ends(loaded: Loaded, tmp_path: Path) -> None:
    file = file_of(tmp_path, "u")
    found = evaluate_texts(loaded, file)
    first, second, *_ = found.total.nats.tolist()
    letters = len(loaded.tokenizer.encode("u"))
    assert letters == 1, "one letter is one token, and the end mark is another"
    lines = evaluate_report.lines(found)
    assert not any("nan" in line for line in lines if str(tmp_path) not in line), lines
    assert lines[-2].split() == ["0-1", f"{(first + second) / 2:.4f}"]
    assert " ".join(lines[-1].split()) == f"2-{SEQ_LENGTH - 1} no token"


def test_a_source_without_bytes_has_no_number() -> None:
    marks = Score(torch.tensor([6.0, 2.0], dtype=torch.float64), torch.tensor([2, 2]), 0, 2)
    text = Score(torch.tensor([1.0, 1.0], dtype=torch.float64), torch.tensor([1, 1]), 4, 1)
    lines = evaluate_report.lines(Evaluation(Path("step_00000001"), "a mixture", 2, {"marks": marks, "text": text}))
    (line,) = (line for line in lines if line.startswith("marks"))
    assert line.split() == ["marks", "2.0000", f"{math.exp(2):.4f}", "-", "4", "0"]


def test_progress_is_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with evaluate_report.progress(8) as on_score:
        for sequences, now in ((2, 9.0), (4, 11.0), (6, 20.0), (8, 22.0)):  # noqa: B007
            on_score(Score(torch.tensor([3.0]), torch.tensor([2]), 5, sequences))
    assert capsys.readouterr().err == "4 of 8 sequences: loss 1.5000\n8 of 8 sequences: loss 1.5000\n"


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes what the test captures for a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with evaluate_report.progress(8) as on_score:
        on_score(Score(torch.tensor([3.0]), torch.tensor([2]), 5, 8))
    told = capsys.readouterr()
    assert "8/8 loss 1.5000" in told.err and told.out == ""


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    score = Score(torch.tensor([9000.0, 0.0], dtype=torch.float64), torch.tensor([1, 0]), 0, 1)
    evaluate_report.write(Evaluation(tmp_path, "somewhere", 2, {"x": score}), tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["perplexity"], found["bits_per_byte"], found["loss_by_position"]) == (None, None, [9000.0, None])


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert run_command(monkeypatch, *arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: ") and told.err.count("\n") == 1
    return told.err.removeprefix("error: ").rstrip("\n")


def test_what_cannot_be_evaluated_is_one_line(
    run: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*arguments: str | Path) -> str:
        return refusal(monkeypatch, capsys, run, *arguments)

    text = file_of(tmp_path, "moss")
    other = train_tokenizer(some_texts(200, seed=9), 360)[0]
    foreign = write_folder(tmp_path / "foreign", some_texts(9, 1), other, validation_fraction=0.5)
    assert f"{foreign} was encoded by another tokenizer" in told("--data", foreign)
    long = write_folder(tmp_path / "long", some_texts(9, 1), tokenizer, validation_fraction=0.5, seq_length=25)
    assert told("--data", long).endswith("--seq-len 25, more than the trained context (train.seq_length = 24)")
    assert told("--data", tmp_path / "gone") == f"data folder {tmp_path / 'gone'} does not exist"
    assert "--data and --text" in told("--data", long, "--text", text)
    assert "--sequences is for data folders" in told("--text", text, "--sequences", "3")
    assert told(text) == f"{text}: text files are named with --text"
    assert told("--text", text, text) == f"--text {text} is given twice"
    assert told("--text", tmp_path / "no") == f"--text {tmp_path / 'no'} cannot be read: No such file or directory"
    assert told("--text", file_of(tmp_path, "", "empty")) == f"--text {tmp_path / 'empty'} is empty"
    (tmp_path / "latin").write_bytes("a\nb\n é".encode("latin-1"))
    assert told("--text", tmp_path / "latin") == f"--text {tmp_path / 'latin'}:3: invalid UTF-8 (byte 0xE9)"
    assert told("--text", "") == "--text must not be empty"
    assert refusal(monkeypatch, capsys, "") == "the argument after eval must not be empty"
    assert "does not exist" in told("--output", tmp_path / "no" / "found.json")
    assert "is a folder" in told("--output", tmp_path)


def test_data_that_is_gone_or_another_is_said(
    run: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, away = run.parent / "verse", tmp_path / "away"
    shutil.move(folder, away)
    try:
        gone = refusal(monkeypatch, capsys, run)
        assert gone == f"data folder {folder} does not exist; evaluate on other data with --data DIR or --text FILE"
        write_folder(folder, some_texts(50, seed=8), tokenizer, validation_fraction=0.5)
        changed = refusal(monkeypatch, capsys, run)
        assert "was trained on other data than" in changed and "--data DIR or --text FILE" in changed
        assert run_command(monkeypatch, run, "--data", folder) == 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.move(away, folder)
