"""The two commands of a cluster's users, on a real SLURM of virtual nodes: to the end, past every interruption."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastslow_scale.monitor import read_metrics
from tests import slurm_lab
from tests.commands import REPOSITORY, environment, fastslow
from tests.integration.test_train import exact, weights
from tests.slurm_lab import Lab, submit_command, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TP2 = ["parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true"]
SLOW = str(REPOSITORY / "tests" / "slow_steps")


def running_lab(nodes: int, accounting: bool = False) -> Iterator[Lab]:
    reason = slurm_lab.missing()
    if reason:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm_lab_") as folder:
        os.chmod(folder, 0o755)  # munge and MariaDB do not accept a socket in a private place
        lab = Lab(Path(folder), nodes, accounting)
        yield lab
        lab.stop()


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Eight nodes of two cores and two pretended GPUs, without accounting."""
    yield from running_lab(8)


@pytest.fixture(scope="module")
def lab_with_accounting() -> Iterator[Lab]:
    yield from running_lab(2, accounting=True)


@pytest.fixture(scope="module")
def uninterrupted(config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data-parallel ranks on this machine, forty steps."""
    run = tmp_path_factory.mktemp("run") / "uninterrupted"
    fastslow("train", config_file, f"train.run_dir={run}", "train.max_steps=40", "--nproc", 2)
    return run


def size(nodes: int, tasks: int) -> list[str]:
    """Of a job, in sbatch's words."""
    return [
        f"--nodes={nodes}",
        f"--ntasks-per-node={tasks}",
        f"--gpus-per-node={tasks}",
        "--cpus-per-task=1",
        "--time=20",
    ]


def script(lab: Lab, folder: Path, *arguments: object, name: str = "pretrain_1b.sh", **variables: str) -> str:
    """sbatch OPTIONS slurm/NAME ARGUMENTS; the logs go into the folder."""
    options = [part for part in arguments if str(part).startswith("--") and not str(part).startswith("--v")]
    rest = [part for part in arguments if part not in options]
    variables = {"LOG_DIR": str(folder / "logs"), "VENV": str(Path(submit_command()[0]).parent.parent)} | variables
    return lab.sbatch(*options, f"--output={folder}/%j.log", REPOSITORY / "slurm" / name, *rest, **variables)


def step_reached(run: Path, step: int) -> bool:
    path = run / "metrics.jsonl"
    return path.exists() and any(record["step"] >= step for record in read_metrics(path) if "loss" in record)


def equal(run: Path, other: Path, step: int) -> None:
    assert exact(run) == exact(other)
    expected = weights(other, step)
    for key, tensor in weights(run, step).items():
        assert (expected[key] == tensor).all(), key


def test_the_script_on_two_nodes_equals_four_ranks_on_one(lab: Lab, config_file: Path, tmp_path: Path) -> None:
    run, here = tmp_path / "run", tmp_path / "here"
    job = script(lab, tmp_path, *size(2, 2), config_file, f"train.run_dir={run}", *TP2)
    ended = lab.ended(job)
    log = (tmp_path / f"{job}.log").read_text()
    assert ended["JobState"] == "COMPLETED", log
    for node in ("n1", "n2"):
        assert re.search(rf"^{node}: no GPU, .* shards, clock [+-]0\.\d s$", log, re.MULTILINE), log
    assert "nothing found that would stop a run" in log
    assert sorted(path.name for path in (tmp_path / "logs" / f"fastslow-{job}").glob("*.log")) == [
        f"rank_{rank}.log" for rank in range(4)
    ]
    fastslow("train", config_file, f"train.run_dir={here}", *TP2, "--nproc", 4)
    assert len(exact(run)) == 12
    equal(run, here, 12)


def test_submit_on_eight_nodes(lab: Lab, config_file: Path, uninterrupted: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["--nodes", 8, "--gpus-per-node", 1, "--cpus-per-task", 1, "--time", "20", "--config", config_file]
    arguments += [f"train.run_dir={run}", "train.max_steps=40", "train.micro_batch_size=1"]
    plan, text = lab.submit(*arguments, "--dry-run").split("\n\n", 1)
    assert "ranks         8 = 8 nodes x 1" in plan
    assert "8 sequences = 8 ranks x 1 x 1 micro-batches; 144 tokens" in plan
    assert "40 steps, 5,760 tokens" in plan
    (tmp_path / "job.sh").write_text(text)
    assert "to start at" in lab.ask("sbatch", "--test-only", tmp_path / "job.sh")
    assert not run.exists()

    lines = lab.submit(*arguments).splitlines()
    job = re.fullmatch(rf"job (\d+), log ({run}/slurm/\d+_0_log.out)", lines[-2])
    assert job, lines
    assert lines[-1] == f"curves: tensorboard --logdir {run}/tb"
    log = Path(job[2])
    assert lab.ended(job[1])["JobState"] == "COMPLETED", log.read_text()
    assert (run / "slurm" / f"{job[1]}_submission.sh").read_text().strip() == text.strip()
    assert len(list((run / "slurm").glob("config-*.yaml"))) == 1
    assert (run / "slurm" / "versions").read_text() == (run / "versions").read_text()
    # Another number of ranks sums in another order: equal but for the last bits.
    got, expected = exact(run), exact(uninterrupted)
    assert [step for step, _, _ in got] == list(range(1, 41))
    assert [loss for _, loss, _ in got] == pytest.approx([loss for _, loss, _ in expected], abs=5e-6, rel=0)


def test_preempted_and_at_the_time_limit_it_saves_and_goes_on(
    lab: Lab, config_file: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    """First a job of a higher partition takes the nodes, then the time limit is met, then the run ends."""
    run = tmp_path / "run"
    arguments = ["--nodes", 2, "--gpus-per-node", 1, "--cpus-per-task", 1, "--time", "20", "--save-seconds", 20]
    arguments += ["--partition", "low", "--config", config_file, "--watch", f"train.run_dir={run}"]
    arguments += ["train.max_steps=40", "checkpoint.every=100"]
    variables = lab.environment() | {"SLOW_STEPS": "2,2"}
    variables["PYTHONPATH"] += f":{SLOW}"
    with subprocess.Popen(
        submit_command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables
    ) as watch:
        try:
            wait_for("a few steps", lambda: step_reached(run, 3))
            job = next((run / "slurm").glob("*_submission.sh")).name.split("_")[0]
            nodes = lab.job(job)["NodeList"]
            other = lab.sbatch(
                "--partition=high",
                f"--nodelist={nodes}",
                "--nodes=2",
                "--exclusive",
                "--output=/dev/null",
                "--wrap=true",
            )
            assert lab.ended(other)["JobState"] == "COMPLETED"
            reached = max(step for step, _, _ in exact(run))
            wait_for("steps after the preemption", lambda: step_reached(run, reached + 2))
            lab.ask("scontrol", "update", f"JobId={job}", "TimeLimit=1")
            wait_for("the time limit", lambda: int(lab.job(job)["Restarts"]) >= 2)
            lab.ask("scontrol", "update", f"JobId={job}", "TimeLimit=20")
            output, _ = watch.communicate(timeout=600)
        finally:
            watch.kill()
    log = (run / "slurm" / f"{job}_0_log.out").read_text()
    assert watch.returncode == 0, output + log
    ended = lab.job(job)
    assert ended["JobState"] == "COMPLETED" and int(ended["Restarts"]) >= 2
    stops = re.findall(r"^stopped by (SIG\w+) after step (\d+)", log, re.MULTILINE)
    assert len(stops) >= 2 and stops[1][0] == "SIGUSR2", log
    assert f"started again {ended['Restarts']} times" in output
    assert "step 40/40" in output
    equal(run, uninterrupted, 40)


def test_a_node_that_dies_costs_the_steps_since_the_last_checkpoint(
    lab: Lab, config_file: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    keys = [f"train.run_dir={run}", "train.max_steps=40", "checkpoint.every=4"]
    slow = {"SLOW_STEPS": "1,1", "PYTHONPATH": f"{REPOSITORY}:{SLOW}"}
    job = script(lab, tmp_path, *size(2, 1), config_file, *keys, **slow)
    wait_for("a checkpoint and a step after it", lambda: step_reached(run, 6))
    second = lab.ask("scontrol", "show", "hostnames", lab.job(job)["NodeList"]).split()[1]
    lab.kill_node(second)
    wait_for("the job's second start", lambda: lab.job(job)["Restarts"] == "1")
    ended = lab.ended(job)
    log = (tmp_path / f"{job}.log").read_text()
    assert ended["JobState"] == "COMPLETED", log
    assert second not in lab.ask("scontrol", "show", "hostnames", ended["NodeList"]).split()
    assert re.search(r"resuming from .*/step_0000000[48]$", rank_0(tmp_path, job), re.MULTILINE), rank_0(tmp_path, job)
    equal(run, uninterrupted, 40)
    lab.start_node(second)
    wait_for(
        "the node's return",
        lambda: lab.ask("sinfo", "-h", "-N", "-n", second, "-p", "main", "-o", "%T").strip() == "idle",
    )


def rank_0(folder: Path, job: str) -> str:
    return next((folder / "logs").glob(f"*-{job}/rank_0.log")).read_text()


def test_a_job_killed_before_it_wrote_anything_ends_the_watch(lab: Lab, config_file: Path, tmp_path: Path) -> None:
    killed_job_ends_the_watch(lab, config_file, tmp_path)


def test_and_with_accounting(lab_with_accounting: Lab, config_file: Path, tmp_path: Path) -> None:
    job = killed_job_ends_the_watch(lab_with_accounting, config_file, tmp_path)
    assert "FAILED" in lab_with_accounting.ask("sacct", "-n", "-X", "-o", "State", "-j", job)


def killed_job_ends_the_watch(lab: Lab, config_file: Path, folder: Path) -> str:
    run = folder / "run"
    arguments = ["--nodes", 2, "--gpus-per-node", 1, "--cpus-per-task", 1, "--time", "20", "--config", config_file]
    with subprocess.Popen(
        submit_command(*arguments, f"train.run_dir={run}", "--watch"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=lab.environment(),
    ) as watch:
        try:
            assert watch.stdout is not None
            line = next(line for line in watch.stdout if " RUNNING on " in line)
            job = line.split()[1].rstrip(":")
            (script,) = wait_for("the job's script", lambda: lab.processes("n1", "slurm_script"))
            script.kill()
            killed = time.monotonic()
            output, _ = watch.communicate(timeout=60)
        finally:
            watch.kill()
    assert time.monotonic() - killed < 30
    assert watch.returncode == 1, output
    assert re.search(rf"^job {job}: ended as FAILED, exit status 0:9$", output, re.MULTILINE), output
    assert f"job {job}: the last lines of {run}/slurm/{job}_0_log.out:" in output
    assert re.search(rf"job {job}: start 1 on 2 nodes", output), output
    assert not (run / "metrics.jsonl").exists()
    return job


def test_the_array_runs_every_variant_with_every_seed(lab: Lab, config_file: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    options = ["--variants", "dense,frozen,coupled", "--seeds", "2", "--output", runs]
    keys = ["train.max_steps=3", "validation.every=0"]
    job = lab.sbatch(
        "--array=0-5",
        *size(1, 1),
        f"--output={tmp_path}/%a.log",
        REPOSITORY / "slurm" / "ablate_array.sh",
        config_file,
        *options,
        *keys,
        LOG_DIR=str(tmp_path / "logs"),
        VENV=str(Path(submit_command()[0]).parent.parent),
    )
    wait_for("the array's end", lambda: not lab.ask("squeue", "-h", "-j", job, "-t", "PD,R,CG,S,CF").strip(), 600)
    curves = {
        (variant, seed): exact(runs / variant / str(seed))
        for variant in ("dense", "frozen", "coupled")
        for seed in (0, 1)
    }
    for seed in (0, 1):
        assert [step for step, _, _ in curves["dense", seed]] == [1, 2, 3]
        assert curves["dense", seed] == curves["frozen", seed], "runs of one seed are paired"
        assert curves["coupled", seed][0][1] == curves["dense", seed][0][1]
        assert curves["coupled", seed] != curves["dense", seed]
    assert curves["dense", 0] != curves["dense", 1]
    told = fastslow("ablate", config_file, *options, *keys)
    assert "6 of 6 runs are finished already" in told
    report = json.loads((runs / "report.json").read_text())
    frozen = next(each for each in report["comparisons"] if each["variant"] == "frozen")
    assert (frozen["differences"], frozen["verdict"]) == ([0.0, 0.0], "equivalent")


def test_a_bad_node_is_named_before_training(lab: Lab, config_file: Path, data: Path, tmp_path: Path) -> None:
    lab.inside_node("n2", "mount", "-t", "tmpfs", "none", data)
    try:
        job = script(lab, tmp_path, *size(2, 1), "--nodelist=n[1-2]", config_file, f"train.run_dir={tmp_path / 'run'}")
        ended = lab.ended(job)
    finally:
        lab.inside_node("n2", "umount", data)
    log = (tmp_path / f"{job}.log").read_text()
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0"), log
    assert f"error: n2: data: {data} is not a data folder: it has no manifest.json\n" in log
    assert "\nerror: n1" not in log
    assert not (tmp_path / "run").exists()


def test_uneven_allocations_are_refused(lab: Lab, config_file: Path, tmp_path: Path) -> None:
    options = ["--nodes=2", "--ntasks=3", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1"]
    job = script(lab, tmp_path, *options, config_file)
    assert lab.ended(job)["ExitCode"] == "2:0"
    assert (tmp_path / f"{job}.log").read_text().startswith("error: uneven allocation: 3 tasks on 2 nodes;")


FAKE_PYTHON = """#!/bin/bash
# Stands in for a virtual environment's python: `-m fastslow_scale.cli COMMAND CONFIG`, where CONFIG says what ranks do.
[ "$3" = train ] || exit 0
case $4-$SLURM_PROCID in
    fail-1) echo "error: the first cause"; exit 1 ;;
    idle-*) exit 75 ;;
    well-*) exit 0 ;;
    *) trap 'exit 75' TERM; echo ready; while :; do sleep 0.1; done ;;
esac
"""


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, str]:
    """Makes a script use FAKE_PYTHON."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return {"VENV": str(tmp_path / "venv")}


def test_a_job_that_starts_on_a_dead_node_waits_for_another(lab: Lab, fake: dict[str, str], tmp_path: Path) -> None:
    """SLURM does not know yet that the node is gone; it comes back in the end."""
    lab.kill_node("n8")
    job = script(lab, tmp_path, *size(2, 1), "--nodelist=n[7-8]", "well", **fake)
    log = tmp_path / f"{job}.log"
    wait_for("the failed start", lambda: log.exists() and "queued again" in log.read_text())
    lab.start_node("n8")
    ended = lab.ended(job)
    assert (ended["JobState"], int(ended["Restarts"]) >= 1) == ("COMPLETED", True), log.read_text()
    assert f"job {job}: no answer from n8\n" in log.read_text()


def test_what_is_not_started_again(lab: Lab, fake: dict[str, str], tmp_path: Path) -> None:
    """A failed rank, a cancelled job, and one that is stopped before the first step again and again."""
    failing, cancelled, idle, chained = (
        script(lab, tmp_path, *size(2, 1), what, **fake, part_of_chain=chain)
        for what, chain in (("fail", "no"), ("cancel", "no"), ("idle", "no"), ("idle", "yes"))
    )

    def log(job: str) -> str:
        path = tmp_path / f"{job}.log"
        return path.read_text() if path.exists() else ""

    logs = tmp_path / "logs"
    wait_for("a rank", lambda: list(logs.glob(f"*-{cancelled}/rank_0.log")) and rank_0(tmp_path, cancelled))
    lab.ask("scancel", cancelled)
    assert lab.ended(failing)["JobState"] == "FAILED"
    assert re.search(r"^error: the first cause\n.*: failed with exit status \d+$", log(failing), re.MULTILINE)
    wait_for("three starts", lambda: "error: three starts in a row were stopped before the first step" in log(idle))
    assert lab.ended(idle)["ExitCode"] == "2:0"
    assert lab.ended(chained)["ExitCode"] == "75:0"
    jobs = [lab.job(job) for job in (failing, cancelled, idle, chained)]
    assert [(job["JobState"], job["Restarts"]) for job in jobs] == [
        ("FAILED", "0"),
        ("CANCELLED", "0"),
        ("FAILED", "2"),
        ("FAILED", "0"),
    ]
    assert "queued again" not in log(cancelled)


def test_a_chain_waits_for_its_links(lab: Lab, config_file: Path, tmp_path: Path) -> None:
    base = ["--nodes", 2, "--gpus-per-node", 1, "--cpus-per-task", 1, "--config", config_file]
    after = lab.sbatch("--hold", "--output=/dev/null", "--wrap=true")
    output = lab.submit(*base, f"train.run_dir={tmp_path}", "--chain", 2, "--dependency", f"after:{after}")
    first, second = re.findall(r"^job (\d+), log", output, re.MULTILINE)
    try:
        assert lab.job(first)["Dependency"] == f"after:{after}(unfulfilled)"
        assert lab.job(second)["Dependency"] == f"afterany:{first}(unfulfilled)"
        assert "\npart_of_chain=yes\n" in (tmp_path / "slurm" / f"{second}_submission.sh").read_text()
    finally:
        lab.ask("scancel", after, first, second)


@pytest.mark.parametrize(("cluster", "ranks"), [("local", 2), ("debug", 1)])
def test_the_same_job_on_this_machine(
    cluster: str, ranks: int, config_file: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    options = ["--cluster", cluster, "--nodes", 2, "--gpus-per-node", 1, "--config", config_file]
    keys = [f"train.run_dir={tmp_path}", "train.max_steps=2", "validation.every=0"]
    done = subprocess.run(
        submit_command(*options, *keys), capture_output=True, text=True, timeout=120, env=environment(), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"ranks         {ranks} = ")
    if cluster == "local":
        assert exact(tmp_path) == exact(uninterrupted)[:2]
    else:
        assert len(exact(tmp_path)) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--partition", "nope"], "--partition nope does not exist here (there are: main, low, high)"),
        (["--nodes", 1, "--gpus-per-node", 4], "--gpus-per-node 4: the nodes of partition main have at most 2"),
        (["--nodes", 3], "train.global_batch_size must be a multiple of"),
        (["--cpus-per-task", 3], "SLURM refuses the job: "),
        (["--config", "/nowhere.yaml"], "config /nowhere.yaml does not exist"),
        (["--time", "soon"], "--time soon is no time that SLURM knows"),
    ],
)
def test_mistakes_are_one_line_and_queue_nothing(
    lab: Lab, config_file: Path, tmp_path: Path, options: list[object], words: str
) -> None:
    run = tmp_path / "run"
    base = ["--nodes", 2, "--gpus-per-node", 2, "--cpus-per-task", 1, "--config", config_file, f"train.run_dir={run}"]
    line = lab.submit(*base, *options, status=2).strip()
    assert line.startswith("error: ") and words in line and len(line.splitlines()) == 1
    assert not run.exists()


def test_more_nodes_than_there_are_is_a_warning(lab: Lab, config_file: Path, tmp_path: Path) -> None:
    keys = [f"train.run_dir={tmp_path}", "train.global_batch_size=18", "train.micro_batch_size=1"]
    base = ["--nodes", 9, "--gpus-per-node", 1, "--cpus-per-task", 1, "--config", config_file]
    output = lab.submit(*base, *keys, "--dry-run")
    assert "warning: partition main has 8 nodes: a job of 9 waits until it has more" in output
