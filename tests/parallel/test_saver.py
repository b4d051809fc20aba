"""Saving in the background: what training may do meanwhile, what stops it, and a kill at every stage of a save."""

from __future__ import annotations

import functools
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from data_pipeline.errors import UserError
from fastslow_scale.parallel.mesh import start_process_group
from fastslow_scale.train import checkpoint_files as files
from fastslow_scale.train import saver as saver_module
from fastslow_scale.train.checkpoint import CheckpointReader, find_checkpoint, find_together, load_checkpoint
from fastslow_scale.train.saver import Saver
from tests.parallel.toy import Run, Setup, error_of, expect, read_all, same
from tests.ranks import RankFailure, run_ranks

WORLD_SIZE = 2
PATIENCE = 30  # seconds until a test that waits for an event gives up

pytestmark = pytest.mark.parallel


@contextmanager
def patched(owner: Any, name: str, function: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def held_back(gate: threading.Event, then: Callable[[Path], None] = lambda path: None) -> Iterator[None]:
    """Tensor files are only written once `gate` is set; `then` may do worse to them."""
    write = files.write_tensors

    def late(path: Path, tensors: Any) -> Any:
        assert gate.wait(PATIENCE)
        then(path)
        return write(path, tensors)

    with patched(files, "write_tensors", late):
        yield


# --- what the ranks do ---------------------------------------------------------------------------------------------


def cases(folder: Path) -> dict[str, str]:
    start_process_group(60)
    wrong = {}
    for case in CASES:
        try:
            case(folder / case.__name__)
        except AssertionError as error:
            wrong[case.__name__] = str(error) or "an assertion failed"
    return wrong


def training_goes_on(folder: Path) -> None:
    """Steps are taken while the files are not written yet, and what is written is the state before them."""
    run = Run(Setup(2, 1), seed=1)
    run.train(0, steps=2)
    expected = read_all(run.save(folder / "at once", step=2, asynchronous=False))
    saver, gate = run.saver(folder / "later"), threading.Event()
    with held_back(gate):
        run.save_with(saver, step=2)
        losses = run.train(2, steps=2)
        expect(saver.check() == [], "durable although nothing was written")
        expect(find_checkpoint(folder / "later").path is None, "there is a checkpoint although nothing was written")
        gate.set()
        (path,) = saver.wait()
    expect(path == find_checkpoint(folder / "later").path, f"{path}")
    expect(same(read_all(path), expected), "the snapshot changed after it was taken")
    expect(saver.check() == [], "told twice")
    # Again, into the same buffers, then from the checkpoint: the later state was not disturbed by the writing.
    run.save_with(saver, step=4)
    (later,) = saver.wait()
    expect(not same(read_all(later), expected), "the second snapshot is the first")
    load_checkpoint(run.engine, run.mesh, path)
    expect(run.train(2, steps=2) == losses, "losses differ after a resume")
    expect(same(read_all(run.save(folder / "again", step=4)), read_all(later)), "states differ after a resume")
    saver.close()


def a_second_save_waits_for_the_first(folder: Path) -> None:
    run, gate, order = Run(Setup(1, 1), seed=1), threading.Event(), list[str]()
    snapshot = saver_module.take_snapshot

    def noted(engine: Any, mesh: Any, step: int, *rest: Any) -> Any:
        order.append(f"snapshot {step}")
        return snapshot(engine, mesh, step, *rest)

    saver = run.saver(folder)
    written = held_back(gate, lambda path: order.append(f"write {path.parent.stem}"))
    with written, patched(saver_module, "take_snapshot", noted):
        run.save_with(saver, step=1)
        threading.Timer(0.3, gate.set).start()  # by then the second save has begun to wait, or has not waited
        run.save_with(saver, step=2)
        names = [path.name for path in saver.wait()]
    expected = ["snapshot 1", "write step_00000001", "snapshot 2", "write step_00000002"]
    expect(order == expected, f"order {order}")
    expect(names == ["step_00000001", "step_00000002"], f"durable {names}")
    saver.close()


def a_failed_write_stops_all_ranks_at_one_step(folder: Path) -> None:
    """The failure comes to light on one rank, at any moment of the steps that go on meanwhile."""
    run = Run(Setup(2, 2), seed=1)
    first = run.save(folder, step=1)
    for attempt in range(3):
        saver, gate = run.saver(folder), threading.Event()

        def half(path: Path) -> None:
            if run.mesh.rank == 1:
                path.write_bytes(b"half")
                raise OSError(f"{path}: No space left on device")

        with held_back(gate, half):
            run.save_with(saver, step=2)
            run.train(0, steps=1)
            saver.check()
            gate.set()
            passed, message, end = 0, "", time.monotonic() + PATIENCE
            while time.monotonic() < end and not message:
                run.train(passed, steps=attempt)  # none: the ranks' checks are not held together by any collective
                try:
                    saver.check()
                    passed += 1
                except UserError as error:
                    message = str(error)
        expect("rank 1" in message and "tp1_dp0.safetensors: No space left" in message, message)
        expect("\n" not in message and "step 2 was not saved" in message, message)
        counts: list[int] = [0] * WORLD_SIZE
        dist.all_gather_object(counts, passed)
        expect(len(set(counts)) == 1, f"the ranks passed {counts} steps")
        for call in (saver.check, saver.wait, functools.partial(run.save_with, saver, 3)):  # it stays failed
            expect(error_of(UserError, call) == message, "another message")
        saver.close()
        dist.barrier()
        expect(sorted(p.name for p in folder.iterdir()) == ["latest", first.name], "something was left behind")
        expect((folder / "latest").read_text() == first.name + "\n", "latest moved")


def a_snapshot_that_fails_on_one_rank_stops_all(folder: Path) -> None:
    run, snapshot = Run(Setup(1, 1), seed=1), saver_module.take_snapshot

    def broken(*args: Any) -> Any:
        if run.mesh.rank == 1:
            raise RuntimeError("the engine is not as it should be")
        return snapshot(*args)

    for asynchronous in (True, False):
        saver = run.saver(folder, asynchronous=asynchronous)
        with patched(saver_module, "take_snapshot", broken):

            def save_and_wait(saver: Saver = saver) -> None:
                run.save_with(saver)
                saver.wait()

            message = error_of(RuntimeError, save_and_wait)
        expect("rank 1: RuntimeError('the engine is not as it should be')" in message, message)
        saver.close()
        dist.barrier()
        expect(list(folder.iterdir()) == [], "something was left behind")


def the_system_refuses(folder: Path) -> None:
    """A file system without room, one that fills up while it is written, one that may not be written, a file."""
    run, disk = Run(Setup(2, 1), seed=1), folder / "disk"
    run.train(0, steps=1)
    first = run.save(disk, step=1)

    with patched(files.shutil, "disk_usage", lambda path: files.shutil._ntuple_diskusage(10**9, 10**9, 2000)):
        message = error_of(UserError, lambda: run.save(disk, step=2))
    expect(f"rank 0: {disk} needs 1.1 MB, but only 0.0 MB are free there" in message, message)
    expect([p.name for p in sorted(disk.iterdir())] == ["latest", first.name], "left behind")

    # The limit on the size of files needs no rights, and fails in the middle of a file like a full disk.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    dist.barrier()
    if run.mesh.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
    try:
        message = error_of(UserError, lambda: run.save(disk, step=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    expect("rank 1" in message and "tp1_dp0.safetensors: File too large" in message, message)
    dist.barrier()
    expect([p.name for p in sorted(disk.iterdir())] == ["latest", first.name], "left behind")
    expect(find_checkpoint(disk).path == first, "the older checkpoint is not the newest any more")

    (folder / "file").write_text("")
    message = error_of(UserError, lambda: run.save(folder / "file", step=2))
    expect("rank 0" in message and str(folder / "file") in message, message)


CASES = [
    training_goes_on,
    a_second_save_waits_for_the_first,
    a_failed_write_stops_all_ranks_at_one_step,
    a_snapshot_that_fails_on_one_rank_stops_all,
    the_system_refuses,
]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_ranks(WORLD_SIZE, cases, tmp_path_factory.mktemp("saver"), timeout=120)


@pytest.mark.parametrize("name", [case.__name__ for case in CASES])
def test_case(name: str, faults: list[dict[str, str]]) -> None:
    for rank, wrong in enumerate(faults):
        assert name not in wrong, f"rank {rank}: {wrong[name]}"


# --- kills ---------------------------------------------------------------------------------------------------------

# Of each stage: the function of `files` whose call is the last thing that happens, the one of its calls, on which rank.
STAGES = {
    "before the data": ("write_tensors", 1, 1),
    "half a file": ("write_chunk", 3, 1),
    "before the manifest": ("_encode", 1, 0),
    "before the rename": ("_sync", 1, 0),
    "before latest": ("_write_text", 2, 0),
    "before clean-up": ("_retire", 1, 0),
    "during clean-up": ("_remove", 1, 0),
}


def die(folder: Path, stage: str, asynchronous: bool) -> None:
    """Saves step 1, trains, and is killed in the save of step 2, while training goes on."""
    start_process_group(60)
    run = Run(Setup(2, 1), seed=1)
    saver = run.saver(folder, keep=1, asynchronous=asynchronous)
    run.train(0, steps=1)
    run.save_with(saver, step=1)
    saver.wait()
    run.train(1, steps=1)
    name, call, rank = STAGES[stage]
    if run.mesh.rank == rank:
        kill_before(name, call)
    run.save_with(saver, step=2)
    for step in range(2, 10_000):
        run.train(step, steps=1)
        saver.check()


def kill_before(name: str, call: int) -> None:
    function, left = getattr(files, name), [call]

    def counted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            if name == "write_chunk":
                args[0].write(args[2][: len(args[2]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    setattr(files, name, counted)


def resume_each(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """What each killed save left to resume from, after the resumed run has equalled the uninterrupted one."""
    start_process_group(60)
    whole = Run(Setup(2, 1), seed=1)
    whole.train(0, steps=3)
    expected = read_all(whole.save(folder / "uninterrupted", step=3))
    left = {}
    for killed in sorted(folder.iterdir()):
        if killed.name == "uninterrupted":
            continue
        found = find_together(killed, "auto")
        expect(found.path is not None and found.passed_over == [], f"{killed.name}: {found}")
        assert found.path is not None
        run = Run(Setup(2, 1), seed=2)
        load_checkpoint(run.engine, run.mesh, found.path)
        step = CheckpointReader(found.path).step
        run.train(step, steps=3 - step)
        path = run.save(killed, step=3, keep=1)
        expect(same(read_all(path), expected), f"{killed.name}: not the uninterrupted run")
        left[killed.name] = (found.path.name, sorted(path.name for path in killed.iterdir()))
    return left


@pytest.mark.slow
def test_a_save_killed_at_any_stage_is_resumed_from_a_sound_step(tmp_path: Path) -> None:
    for stage in STAGES:
        for asynchronous in (True, False) if stage == "half a file" else (True,):
            folder = tmp_path / f"{stage}{'' if asynchronous else ', at once'}"
            with pytest.raises(RankFailure, match=f"rank {STAGES[stage][2]}: died without a word"):
                run_ranks(WORLD_SIZE, die, folder, stage, asynchronous, timeout=60)
    old, new = ("step_00000001", ["latest", "step_00000003"]), ("step_00000002", ["latest", "step_00000003"])
    assert run_ranks(WORLD_SIZE, resume_each, tmp_path)[0] == {
        "before the data": old,
        "half a file": old,
        "half a file, at once": old,
        "before the manifest": old,
        "before the rename": old,
        "before latest": new,
        "before clean-up": new,
        "during clean-up": new,
    }
