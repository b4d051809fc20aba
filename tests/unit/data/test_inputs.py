"""From names to documents, and each way in which a corpus can be wrong."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_pipeline.errors import UserError
from data_pipeline.faults import Fault
from data_pipeline.inputs import find_files
from data_pipeline.readers import Extent, read_documents, read_extent

pytestmark = pytest.mark.unit

Pack = Callable[[bytes], bytes]
PACKERS: dict[str, Pack] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


def read(*inputs: object, text_field: str = "text") -> list[tuple[str, str]]:
    files = find_files([str(name) for name in inputs])
    return [(document.text, document.source) for document in read_documents(files.files, text_field)]


def read_skipping(*inputs: object) -> tuple[list[str], list[Fault]]:
    faults: list[Fault] = []
    files = find_files([str(name) for name in inputs])
    texts = [document.text for document in read_documents(files.files, on_fault=faults.append)]
    return texts, faults


def write_parquet(path: Path, columns: dict[str, object], **options: object) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)


@pytest.mark.parametrize("packing", PACKERS)
def test_text_file_is_one_document_with_its_bytes(tmp_path: Path, nasty_texts: list[str], packing: str) -> None:
    for number, text in enumerate(nasty_texts):
        (tmp_path / f"{number:03d}.txt{packing}").write_bytes(PACKERS[packing](text.encode()))
    assert [text for text, _ in read(tmp_path)] == nasty_texts


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_archives_of_several_members_are_read_to_their_end(tmp_path: Path, packing: str) -> None:
    pack = PACKERS[packing]
    rows = [json.dumps({"text": f"row {number}"}) + "\n" for number in range(3000)]
    middle = "".join(rows[10:])
    content = pack(rows[0].encode()) + pack("".join(rows[1:10]).encode()) + pack(b"") + pack(middle.encode())
    (tmp_path / f"rows.jsonl{packing}").write_bytes(content)
    assert [text for text, _ in read(tmp_path)] == [f"row {number}" for number in range(3000)]


def test_characters_that_lie_across_blocks_are_read_whole(tmp_path: Path) -> None:
    text = "x" * ((1 << 20) - 1) + "\U0001f600" + "y" * (1 << 20) + "\u00e9"
    (tmp_path / "long.txt").write_bytes(text.encode())
    items = list(read_extent(Extent(find_files([str(tmp_path)]).files[0])))
    assert [item.continues for item in items] == [True, True, False]  # type: ignore[union-attr]
    assert "".join(item.text for item in items) == text  # type: ignore[union-attr]


def test_code_and_markdown_are_found_in_folders(tmp_path: Path) -> None:
    names = ["a.py", "b.RS", "c.md", "d.json", "e.unknown", "LICENSE", ".git/config.py", ".hidden.txt", "sub/f.cpp"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "sub" / "__init__.py").write_text("")
    found = find_files([str(tmp_path)])
    assert [Path(file.name).name for file in found.files] == [".hidden.txt", "a.py", "b.RS", "c.md", "f.cpp"]
    assert (found.num_ignored, found.num_empty) == (4, 1)
    more = find_files([str(tmp_path)], ["json", ".Unknown"])
    assert {Path(file.name).name for file in more.files} >= {"d.json", "e.unknown"}
    assert more.num_ignored == 2


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_parquet_gives_a_document_a_row(tmp_path: Path, nasty_texts: list[str], kind: str) -> None:
    types = {"string": pyarrow.string(), "large_string": pyarrow.large_string()}
    types["dictionary"] = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    texts = nasty_texts * 20
    columns = {"id": list(range(len(texts))), "body": pyarrow.array(texts, types[kind])}
    write_parquet(tmp_path / "rows.parquet", columns, row_group_size=30)
    documents = read(tmp_path, text_field="body")
    assert [text for text, _ in documents] == texts
    assert documents[100][1] == f"{tmp_path}/rows.parquet:row 101"


def test_parts_of_a_file_give_each_document_once(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"{number} " * (number % 7 + 1)}) for number in range(200)]
    content = "\n".join(rows)
    (tmp_path / "rows.jsonl").write_text(content)
    (file,) = find_files([str(tmp_path)]).files
    whole = list(read_extent(Extent(file)))
    assert len(whole) == 200
    texts = [item.text for item in whole]  # type: ignore[union-attr]
    line_end = content.index("\n", 700)
    for bounds in (
        [0, 1, 2],
        [0, 333, 1000, 2222],
        [0, line_end, line_end + 1, line_end + 2],
        [0, 5, len(content) - 1],
    ):
        parts = [Extent(file, start, stop) for start, stop in zip(bounds, [*bounds[1:], None], strict=True)]
        assert [item.text for part in parts for item in read_extent(part)] == texts  # type: ignore[union-attr]

    table = {"text": [f"row {number}" for number in range(100)]}
    write_parquet(tmp_path / "t.parquet", table, row_group_size=13)
    file = find_files([str(tmp_path / "t.parquet")]).files[0]
    items = [item for bounds in ((0, 3), (3, 4), (4, None)) for item in read_extent(Extent(file, *bounds))]
    assert [item.text for item in items] == table["text"]  # type: ignore[union-attr]
    assert items[50].source.endswith(":row 51")  # type: ignore[union-attr]


def test_a_fault_in_a_part_names_the_line_of_the_file(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"row {number}"}) for number in range(100)]
    rows[70] = "{"
    content = "\n".join(rows)
    (tmp_path / "rows.jsonl").write_text(content)
    (file,) = find_files([str(tmp_path)]).files
    for start in (1, 200, content.index("{\n"), content.index("{\n") - 1):
        faults = [item for item in read_extent(Extent(file, start)) if isinstance(item, Fault)]
        assert [fault.place for fault in faults] == [f"{file.name}:71"]


def parquet_bytes(values: list[object], kind: pyarrow.DataType) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(values, kind)}), buffer)
    return buffer.getvalue()


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
    assert [Path(file.name).name for file in found.files] == ["a.txt", "b.txt", "c.txt"]
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
        ("cut.txt.gz", gzip.compress(b"a\n" * 9000)[:-9], "cut.txt.gz:1: the compressed data ends early"),
        ("short.txt.gz", gzip.compress(b"a\n")[:5], "short.txt.gz:1: the compressed data ends early"),
        ("odd.txt.gz", b"no archive", "odd.txt.gz:1: the compressed data is damaged"),
        ("empty.txt.gz", gzip.compress(b""), "empty.txt.gz: the file is empty"),
        ("cut.jsonl.zst", PACKERS[".zst"](b'{"text": "a"}\n' * 9)[:-4], "the compressed data ends early"),
        ("none.jsonl.zst", PACKERS[".zst"](b"")[:-1], "none.jsonl.zst:1: the compressed data ends early"),
        ("odd.jsonl.zst", b"no archive", "odd.jsonl.zst:1: the compressed data is damaged"),
        ("a.parquet", b"PAR1 no table PAR1", "a.parquet: the Parquet data cannot be read"),
        ("b.parquet", parquet_bytes(["x"], pyarrow.string())[:-7], "b.parquet: the Parquet data cannot be read"),
        ("c.parquet", parquet_bytes([1], pyarrow.int64()), "c.parquet: column 'text' must be text (got int64)"),
        ("d.parquet", parquet_bytes(["a", None], pyarrow.string()), "d.parquet:row 2: column 'text' is null"),
        ("e.parquet", parquet_bytes(["a", ""], pyarrow.string()), "e.parquet:row 2: column 'text' is empty"),
        ("f.parquet", parquet_bytes([], pyarrow.string()), "f.parquet: the file holds no rows"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
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
        ("folder", "folder is a folder that holds no file of a known kind (.txt, .md, .jsonl"),
        ("folder/x.pdf", "x.pdf is of an unknown kind (known: .txt, .md, .jsonl"),
        ("folder/*.pdf", "x.pdf is of an unknown kind (known: .txt, .md, .jsonl"),
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
        list(read_documents(files.files))


def test_skipping_loses_what_is_broken_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine")
    (tmp_path / "b.txt").write_bytes(b"x" * (3 << 20) + b"\n\xff")
    (tmp_path / "c.txt").write_bytes(b"")
    rows = [
        b'{"text": "one"}',
        b"{",
        b'{"text": ""}',
        b'{"text": "\xe9"}',
        b'{"text": "\\udc00"}',
        b'{"text": "two"}',
        b"",
    ]
    (tmp_path / "d.jsonl").write_bytes(b"\n".join(rows))
    noise = os.urandom(30_000).hex()
    rows = [json.dumps({"text": f"row {number}", "id": noise}).encode() for number in range(20)]
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(b"\n".join(rows))[:-50_000])
    texts, faults = read_skipping(tmp_path)
    assert texts[:3] == ["fine", "one", "two"]
    whole = len(texts) - 3
    assert texts[3:] == [f"row {number}" for number in range(whole)]
    assert 10 < whole < 20
    assert [(fault.kind, fault.place.removeprefix(f"{tmp_path}/")) for fault in faults] == [
        ("invalid UTF-8", "b.txt:2"),
        ("empty file", "c.txt"),
        ("broken JSON", "d.jsonl:2"),
        ("empty document", "d.jsonl:3"),
        ("invalid UTF-8", "d.jsonl:4"),
        ("lone surrogate", "d.jsonl:5"),
        ("truncated file", f"e.jsonl.gz:{whole + 1}"),
    ]


def test_a_damaged_page_of_parquet_is_a_fault_of_that_row_on(tmp_path: Path) -> None:
    texts = [f"row {number} " * 50 for number in range(1000)]
    path = tmp_path / "t.parquet"
    write_parquet(path, {"text": texts}, row_group_size=100, compression="zstd")
    place = pyarrow.parquet.ParquetFile(path).metadata.row_group(6).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[place : place + 40] = bytes(40)
    path.write_bytes(content)
    found, faults = read_skipping(path)
    assert found == texts[: len(found)]
    assert 500 <= len(found) <= 600
    assert [(fault.kind, fault.place) for fault in faults] == [("damaged file", f"{path}:row {len(found) + 1}")]


def test_only_some_urls_are_read() -> None:
    for url in ("pipe://cat x.txt", "ftp://host/x.txt"):
        with pytest.raises(
            UserError, match=r"is not a URL that can be read \(known: http://, https://, s3://, gs://\)"
        ):
            find_files([url])
    with pytest.raises(UserError):
        find_files(["simplecache::s3://bucket/x.txt"])
