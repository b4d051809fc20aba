"""From names to documents, and each way in which a corpus can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_pipeline.errors import UserError
from data_pipeline.inputs import find_files, read_documents

pytestmark = pytest.mark.unit


def read(*inputs: object, text_field: str = "text") -> list[tuple[str, str]]:
    files = find_files([str(name) for name in inputs])
    return [(document.text, document.source) for document in read_documents(files, text_field)]


def test_text_file_is_one_document_with_its_bytes(tmp_path: Path, nasty_texts: list[str]) -> None:
    for number, text in enumerate(nasty_texts):
        (tmp_path / f"{number:03d}.txt").write_bytes(text.encode())
    assert [text for text, _ in read(tmp_path)] == nasty_texts


@pytest.mark.parametrize("ascii_only", [True, False])
def test_json_lines_give_a_document_a_row(tmp_path: Path, nasty_texts: list[str], ascii_only: bool) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"id": n, "body": text}, ensure_ascii=ascii_only) for n, text in enumerate(nasty_texts)]
    path.write_bytes(("\n".join(rows) + "\n\n").encode())
    documents = read(path, text_field="body")
    assert [text for text, _ in documents] == nasty_texts
    assert documents[2][1] == f"{path}:3"


def test_files_folders_and_globs_name_each_file_once(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "deep/skipped.pdf"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = find_files([str(tmp_path), f"{tmp_path}/*.txt", f"{tmp_path}/**/c.txt", str(tmp_path / "a.txt")])
    assert [path.name for path in found.paths] == ["a.txt", "b.txt", "c.txt"]
    assert found.num_ignored == 1
    assert found.num_bytes == len("b.txt" + "a.txt" + "deep/er/c.txt")


def test_a_file_whose_name_looks_like_a_glob(tmp_path: Path) -> None:
    (tmp_path / "odd[1].txt").write_text("x")
    assert read(tmp_path / "odd[1].txt") == [("x", str(tmp_path / "odd[1].txt"))]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "empty.txt: the file is empty"),
        ("empty.jsonl", b"", "empty.jsonl: the file is empty"),
        ("blank.jsonl", b"\n  \n", "blank.jsonl: the file holds no rows"),
        ("bad.txt", b"fine\nalso fine\nbad \xff\n", "bad.txt:3: invalid UTF-8 (byte 0xFF)"),
        ("cut.txt", "caf\u00e9".encode()[:-1], "cut.txt:1: invalid UTF-8 (byte 0xC3)"),
        ("surrogate.txt", b"ok\n\xed\xa0\x80", "surrogate.txt:2: invalid UTF-8 (byte 0xED)"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "bad.jsonl:2: invalid UTF-8 (byte 0xFF)"),
        (
            "surrogate.jsonl",
            b'{"text": "a"}\n{"text": "x\\ud800y"}\n',
            "surrogate.jsonl:2: field 'text' holds a lone sur",
        ),
        ("cut.jsonl", b'{"text": "a"}\n{"text": "b', "cut.jsonl:2: not a JSON row"),
        ("deep.jsonl", b"[" * 100_000 + b"\n", "deep.jsonl:1: not a JSON row"),
        ("list.jsonl", b'["text"]\n', "list.jsonl:1: the row must be a JSON object (got list)"),
        ("field.jsonl", b'{"body": "a", "id": 1}\n', "field.jsonl:1: the row has no field 'text' (it has: body, id)"),
        ("number.jsonl", b'{"text": 7}\n', "number.jsonl:1: field 'text' must be text (got int)"),
        ("none.jsonl", b'{"text": ""}\n', "none.jsonl:1: field 'text' is empty"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as raised:
        read(tmp_path / name)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.txt", "missing.txt does not exist"),
        ("*.txt", "*.txt matches no file"),
        ("**/nothing*", "matches no file"),
        ("folder", "folder is a folder that holds no .jsonl, .txt file"),
        ("folder/x.pdf", "x.pdf is of an unknown kind (known: .jsonl, .txt)"),
        ("folder/*.pdf", "x.pdf is of an unknown kind (known: .jsonl, .txt)"),
    ],
)
def test_an_input_that_names_no_text_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.pdf").write_bytes(b"%PDF")
    with pytest.raises(UserError) as raised:
        find_files([str(tmp_path / name)])
    assert message in str(raised.value)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone.txt").write_text("x")
    files = find_files([str(tmp_path / "gone.txt")])
    (tmp_path / "gone.txt").unlink()
    with pytest.raises(UserError, match=r"gone\.txt: cannot be read: No such file"):
        list(read_documents(files))
