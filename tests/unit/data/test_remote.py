"""Data folders behind a web server and behind an object store: the same rows, the same care, bounded disk."""

from __future__ import annotations

import itertools
import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from data_pipeline.batches import step_batches
from data_pipeline.errors import UserError
from data_pipeline.folder import CacheSettings
from data_pipeline.mixture import Mixture, sources_of
from data_pipeline.order import SampleOrder
from data_pipeline.stream import TokenDataset
from tests.unit.data.damage import DAMAGES, SHARD, member_rows, stand_in
from tests.unit.data.servers import FileServer, Waits, bytes_in, cache_at
from tests.unit.data.test_order import naive_key, naive_permutation

pytestmark = pytest.mark.unit

Put = Callable[[Path], str]


@pytest.fixture
def folder(tmp_path: Path, shared_folder: Path) -> Path:
    return Path(shutil.copytree(shared_folder, tmp_path / "served" / "data"))


@pytest.fixture
def server(folder: Path) -> Iterator[FileServer]:
    server = FileServer(folder.parent)
    yield server
    server.close()


@pytest.fixture
def cache(tmp_path: Path) -> CacheSettings:
    return cache_at(tmp_path / "cache")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of an S3 server of its own, with a bucket `bucket`; the environment says where it is."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_CONFIG_FILE", str(tmp_path_factory.mktemp("aws") / "none"))
        yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["http", "s3"])
def put(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Put]:
    """put(folder) -> the URL under which its present content is served"""
    if request.param == "http":
        servers: list[FileServer] = []

        def serve(folder: Path) -> str:
            servers.append(FileServer(folder.parent))
            return f"{servers[-1].url}/{folder.name}"

        yield serve
        for server in servers:
            server.close()
        return
    request.getfixturevalue("s3")
    import boto3

    client = boto3.client("s3")

    def upload(folder: Path) -> str:
        bucket = f"bucket-{abs(hash(tmp_path))}"
        client.create_bucket(Bucket=bucket)
        for file in folder.rglob("*"):
            if file.is_file():
                client.put_object(Bucket=bucket, Key=f"data/{file.relative_to(folder)}", Body=file.read_bytes())
        return f"s3://{bucket}/data"

    yield upload


def test_rows_equal_those_of_the_folder(put: Put, folder: Path, cache: CacheSettings) -> None:
    here, far = TokenDataset.open(folder), TokenDataset.open(put(folder), cache=cache)
    assert (far.fingerprint, far.num_samples) == (here.fingerprint, here.num_samples)
    assert torch.equal(far.rows(range(far.num_samples)), here.rows(range(here.num_samples)))
    validation = TokenDataset.open(far.location, "validation", cache=cache)
    assert torch.equal(validation.rows([0]), TokenDataset.open(folder, "validation").rows([0]))


@pytest.mark.parametrize("harm", DAMAGES, ids=lambda harm: harm.__name__)
def test_no_wrong_token_leaves_the_reader(
    put: Put, folder: Path, cache: CacheSettings, harm: Callable[[Path], list[int]]
) -> None:
    whole = member_rows(folder)
    lost = harm(folder)
    dataset = TokenDataset.open(put(folder), cache=cache)
    for member, rows in enumerate(whole):
        ids = range(64 * member, 64 * member + len(rows))
        if member in lost:
            with pytest.raises(UserError, match=rf"data/train/shard-00000\d.tar member {member:09d}\.bin"):
                dataset.rows(ids)
        else:
            assert torch.equal(dataset.rows(ids), rows)


@pytest.mark.parametrize("gigabytes", [1.0, 1e-5], ids=["shards", "members"])
@pytest.mark.parametrize("harm", DAMAGES, ids=lambda harm: harm.__name__)
def test_skipping_loses_exactly_the_damaged_members(
    put: Put, folder: Path, tmp_path: Path, harm: Callable[[Path], list[int]], gigabytes: float
) -> None:
    """Whether shards are fetched whole or the cache has only room for members."""
    whole = member_rows(folder)
    lost = harm(folder)
    cache = cache_at(tmp_path / "cache", gigabytes)
    dataset = TokenDataset.open(put(folder), cache=cache, on_error="skip")
    for member in range(len(whole)):
        read = dataset.rows(range(64 * member, 64 * member + len(whole[member])))
        assert torch.equal(read, stand_in(whole, lost, member) if member in lost else whole[member])
    assert sorted(line.split(" member ")[1][:9] for line in dataset.take_skipped()) == [f"{n:09d}" for n in lost]


def test_a_manifest_edited_by_hand(put: Put, folder: Path, cache: CacheSettings) -> None:
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"pad_id": 3', '"pad_id": 2'))
    url = put(folder)
    with pytest.raises(UserError) as raised:
        TokenDataset.open(url, cache=cache)
    assert str(raised.value).startswith(f"{url}/manifest.json was changed after it was written")


def test_small_files_are_checked(put: Put, folder: Path, cache: CacheSettings) -> None:
    index = bytearray((folder / "train" / "index.npy").read_bytes())
    index[-1] ^= 1
    (folder / "train" / "index.npy").write_bytes(index)
    url = put(folder)
    with pytest.raises(UserError, match=rf"{url}/train/index.npy is damaged: its sha256"):
        TokenDataset.open(url, cache=cache)
    with pytest.raises(UserError, match=rf"{url}/nowhere is not a data folder: it has no manifest.json"):
        TokenDataset.open(f"{url}/nowhere", cache=cache)


def test_each_shard_is_fetched_once_for_all_who_share_the_cache(
    server: FileServer, folder: Path, cache: CacheSettings
) -> None:
    here = TokenDataset.open(folder)
    for _ in range(3):
        far = TokenDataset.open(f"{server.url}/data/", cache=cache)
        copy = pickle.loads(pickle.dumps(far))
        assert torch.equal(copy.rows(range(here.num_samples)), here.rows(range(here.num_samples)))
    shards = [path for path, _ in server.requests if path.startswith("data/train/") and path.endswith(".tar")]
    assert sorted(shards) == sorted(f"data/train/{shard.name}" for shard in here.manifest.splits["train"].shards)
    tables = [path for path, _ in server.requests if path.endswith((".npy", ".model"))]
    assert sorted(tables) == ["data/tokenizer.model", "data/train/index.npy"]


def test_a_cache_smaller_than_the_data_fetches_members(server: FileServer, folder: Path, tmp_path: Path) -> None:
    """Each member once while nothing else wants its room, and never more on the disk than allowed."""
    here = TokenDataset.open(folder)
    largest = int(here._index["size"].max())
    cache = cache_at(tmp_path / "cache", gigabytes=3.5 * largest / 1e9)
    taken: list[int] = []
    server.on_request = lambda: taken.append(bytes_in(cache.folder / "shards"))
    far = TokenDataset.open(f"{server.url}/data", cache=cache)
    assert torch.equal(far.rows(range(here.num_samples)), here.rows(range(here.num_samples)))
    spans = [span for path, span in server.requests if path.endswith(".tar")]
    assert [last - first + 1 for first, last in filter(None, spans)] == here._index["size"].tolist()
    assert largest < max(taken) <= 3.5 * largest
    server.faults["shard-000000.tar"] = ["flip"]
    again = TokenDataset.open(far.location, cache=cache)
    assert torch.equal(again.rows([0]), here.rows([0])), "one wrong answer is asked for again"
    assert server.requested("shard-000000.tar") == 3 + 2


def test_no_more_is_fetched_ahead_than_the_cache_holds(
    server: FileServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = TokenDataset.open(folder)._index["size"]
    tasks: list[int] = []
    monkeypatch.setattr("data_pipeline.remote_folder._Prefetcher.replace", lambda _, wanted: tasks.append(len(wanted)))
    for gigabytes in (3.5 * int(sizes[0]) / 1e9, 1.0):
        far = TokenDataset.open(f"{server.url}/data", cache=cache_at(tmp_path / "cache", gigabytes))
        far.prefetch(range(len(sizes)))
    assert tasks == [3, len(far.manifest.splits["train"].shards)]


def test_a_server_without_ranges_needs_room_for_the_shards(server: FileServer, tmp_path: Path) -> None:
    server.serves_ranges = False
    far = TokenDataset.open(f"{server.url}/data", cache=cache_at(tmp_path / "cache", gigabytes=1e-5))
    with pytest.raises(UserError, match="does not serve parts of files"):
        far.rows([0])


def test_two_folders_share_a_cache_that_holds_one(
    server: FileServer, folder: Path, tmp_path: Path, write: Callable[..., Path], texts: list[str]
) -> None:
    """Shards are evicted for each other, and what is read stays right."""
    other = write(folder.parent / "other", texts[::-1], shard_bytes=5_000)
    size = sum(file.stat().st_size for file in folder.rglob("*.tar"))
    assert abs(size - sum(file.stat().st_size for file in other.rglob("*.tar"))) < size / 10
    cache = cache_at(tmp_path / "cache", gigabytes=1.1 * size / 1e9)
    taken: list[int] = []
    server.on_request = lambda: taken.append(bytes_in(cache.folder / "shards"))

    def read(*locations: str, cache: CacheSettings | None = None) -> torch.Tensor:
        mixture = Mixture.open(sources_of((location, 1.0, None) for location in locations), cache=cache)
        reader = step_batches(
            mixture, seed=1, start_sample=0, global_batch_size=16, dp_rank=0, dp_size=1, num_workers=0
        )
        return torch.stack(list(itertools.islice(reader, mixture.num_samples // 16)))

    far = read(f"{server.url}/data", f"{server.url}/other", cache=cache)
    assert torch.equal(far, read(str(folder), str(other)))
    assert size / 2 < max(taken) <= 1.1 * size
    assert bytes_in(cache.folder / "shards") <= 1.1 * size


@pytest.mark.parametrize("faults", [["500"] * 3, ["drop"] * 3, ["drop", "flip", "500"]], ids="-".join)
def test_faults_that_pass_are_survived(server: FileServer, folder: Path, tmp_path: Path, faults: list[str]) -> None:
    waits = Waits()
    cache = cache_at(tmp_path / "cache", attempts=4, waits=waits)
    server.faults[SHARD] = list(faults)
    far = TokenDataset.open(f"{server.url}/data", cache=cache)
    n = far.num_samples
    assert torch.equal(far.rows(range(n)), TokenDataset.open(folder).rows(range(n)))
    assert server.requested(SHARD) == 4
    assert waits.seconds == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("fault", ["stall", "drip"])
def test_a_slow_answer_is_given_up(server: FileServer, folder: Path, tmp_path: Path, fault: str) -> None:
    server.faults[SHARD] = [fault]
    far = TokenDataset.open(f"{server.url}/data", cache=cache_at(tmp_path / "cache", attempt_seconds=0.3))
    n = far.num_samples
    assert torch.equal(far.rows(range(n)), TokenDataset.open(folder).rows(range(n)))
    assert server.requested(SHARD) == 2


@pytest.mark.parametrize(("fault", "reason"), [("500", "Internal Server Error"), ("drop", "."), ("stall", "Timeout")])
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_fault_that_stays_is_a_clear_error(
    server: FileServer, tmp_path: Path, fault: str, reason: str, on_error: str
) -> None:
    """With skipping too: a server that does not answer is no damage."""
    far = TokenDataset.open(
        f"{server.url}/data",
        on_error=on_error,  # type: ignore[arg-type]
        cache=cache_at(tmp_path / "cache", attempts=2, attempt_seconds=0.2),
    )
    server.faults["shard-000000.tar"] = [fault] * 100
    with pytest.raises(UserError) as raised:
        far.rows([0])
    message = str(raised.value)
    assert message.startswith(f"{server.url}/data/train/shard-000000.tar cannot be read, tried 2 times: ")
    assert reason in message
    assert "\n" not in message
    assert not list((tmp_path / "cache" / "shards").glob("*.part")), "no half file stays"


def test_a_server_that_is_gone(server: FileServer, cache: CacheSettings) -> None:
    far = TokenDataset.open(f"{server.url}/data", cache=cache)
    server.close()
    with pytest.raises(UserError, match=r"shard-000000.tar cannot be read, tried 3 times: ClientConnectorError"):
        far.rows([0])


def test_urls_of_other_kinds_are_refused(cache: CacheSettings) -> None:
    for url in ("ftp://host/data", "pipe://cat", "file:///etc", "reference://x"):
        with pytest.raises(UserError, match="is not a URL that can be read"):
            TokenDataset.open(url, cache=cache)


def test_the_next_window_is_fetched_while_this_one_is_read(
    server: FileServer, tmp_path: Path, write: Callable[..., Path], texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch is asked for; the shards of this and of the next window come without being asked for, no others."""
    monkeypatch.setattr("data_pipeline.mixture.SampleOrder", partial(SampleOrder, window_members=3))
    folder = write(server.folder / "many", texts, seq_length=4, shard_bytes=1)
    members = TokenDataset.open(folder)._index
    assert members["shard"].tolist() == list(range(len(members))), "a shard a member"
    asked: list[list[int]] = []
    prefetch = TokenDataset.prefetch
    monkeypatch.setattr(TokenDataset, "prefetch", lambda data, ids: (asked.append(ids), prefetch(data, ids)))
    far = TokenDataset.open(f"{server.url}/many", cache=cache_at(tmp_path / "cache"))
    reader = step_batches(far, seed=0, start_sample=0, global_batch_size=8, dp_rank=0, dp_size=1, num_workers=0)
    next(reader)
    order = naive_permutation(len(members), naive_key(0, 0))
    assert asked == [order[:6]]
    server.wait_until(lambda: all(server.requested(f"many/train/shard-{shard:06d}.tar") for shard in order[:6]))
    for _ in range(3 * 64 // 8):
        next(reader)
    assert asked == [order[:6], order[3:9]]
    assert all(server.requested(f"many/train/shard-{shard:06d}.tar") == 1 for shard in order[:6]), "once, by whoever"
