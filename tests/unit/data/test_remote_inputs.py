"""Corpora behind URLs, read from a real server on this machine that fails now and then."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data_pipeline.encode import Reading
from data_pipeline.errors import UserError
from data_pipeline.inputs import find_files
from data_pipeline.pool import Corpus
from data_pipeline.readers import read_documents, read_extent
from data_pipeline.shards import Layout, write_data_folder
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.units import plan_units
from tests.unit.data.servers import FileServer

pytestmark = pytest.mark.unit


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr("data_pipeline.streams._SECONDS_BEFORE_ATTEMPTS", (0.0, 0.0, 0.0))
    (tmp_path / "served").mkdir()
    server = FileServer(tmp_path / "served")
    yield server
    server.close()


@pytest.fixture
def urls(server: FileServer, texts: list[str]) -> list[str]:
    rows = [json.dumps({"text": text}) for text in texts]
    (server.folder / "a.jsonl").write_text("\n".join(rows[:40]))
    (server.folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(rows[40:80]).encode()))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts[80:100]}), server.folder / "c.parquet")
    (server.folder / "d.txt").write_text(texts[100])
    return [f"{server.url}/{name}" for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.txt")]


def test_files_behind_urls_are_read(urls: list[str], texts: list[str]) -> None:
    found = find_files(urls)
    assert [file.name for file in found.files] == urls
    assert all(file.size for file in found.files)
    assert [document.text for document in read_documents(found.files)] == texts[:101]


def test_a_server_that_fails_for_a_while_is_survived(server: FileServer, urls: list[str], texts: list[str]) -> None:
    found = find_files(urls)
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        server.faults[name] = ["500", "drop", "500"]
    assert [document.text for document in read_documents(found.files)] == texts[:101]
    assert not any(server.faults.values())


def test_a_server_that_stays_down_is_named(server: FileServer, urls: list[str]) -> None:
    found = find_files(urls[:1])
    server.faults["a.jsonl"] = ["500"] * 100
    with pytest.raises(UserError, match=rf"^{urls[0]}(:1)?: cannot be read: .*4 attempts\)$"):
        list(read_documents(found.files))


def test_remote_and_local_files_give_the_same_folder(
    tmp_path: Path, server: FileServer, urls: list[str], tokenizer: Tokenizer
) -> None:
    manifests = [
        write_data_folder(
            tmp_path / str(n), Corpus(find_files(inputs), Reading()), tokenizer, Layout(32), workers=n + 1
        )
        for n, inputs in enumerate(([str(server.folder)], urls))
    ]
    assert manifests[0] == manifests[1]


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """s3:// URL of an empty bucket on a server of this machine."""
    import boto3
    import fsspec
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    boto3.client("s3").create_bucket(Bucket="corpus")
    yield "s3://corpus"
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.stop()


def test_a_bucket_is_searched_like_a_folder(
    bucket: str, server: FileServer, urls: list[str], texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    for file in server.folder.iterdir():
        boto3.client("s3").put_object(Bucket="corpus", Key=f"deep/{file.name}", Body=file.read_bytes())
    boto3.client("s3").put_object(Bucket="corpus", Key="deep/image.png", Body=b"x")
    found = find_files([bucket])
    assert [file.name for file in found.files] == [f"{bucket}/deep/{Path(url).name}" for url in urls]
    assert found.num_ignored == 1
    assert all(file.size and file.stamp for file in found.files)
    monkeypatch.setattr("data_pipeline.units.SMALLEST_UNIT_BYTES", 1500)
    extents = [extent for unit in plan_units(found) for extent in unit.extents]
    assert len(extents) > 6
    items = [item for extent in extents for item in read_extent(extent)]
    assert [item.text for item in items] == texts[:101]  # type: ignore[union-attr]
    assert find_files([f"{bucket}/deep/*.jsonl"]).files == (found.files[0],)


def test_what_is_not_there_is_named(server: FileServer) -> None:
    with pytest.raises(UserError, match=rf"--input {server.url}/none.txt cannot be read"):
        find_files([f"{server.url}/none.txt"])


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UserError, match=r"the package fsspec is missing: pip install 'fastslow-scale\[remote\]'"):
        find_files(["https://127.0.0.1/x.txt"])
