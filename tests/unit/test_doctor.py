"""What would stop a run, on one machine and over several that report to the first."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from data_pipeline.errors import UserError
from fastslow_scale.launch import doctor, roll_call
from fastslow_scale.launch.doctor import Report, examine
from fastslow_scale.launch.roll_call import collect, judge, report_to
from tests.commands import fastslow, refused
from tests.configs import small_config

pytestmark = pytest.mark.unit

NVIDIA_SMI = "#!/bin/sh\nprintf 'NVIDIA H100 80GB HBM3, 81559, 0\\nNVIDIA H100 80GB HBM3, 81559, 40000\\n'\n"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def called(hosts: list[str], reports: list[Report], shared: Path | None = None, seconds: float = 20) -> list[Report]:
    """The roll call of these hosts, in which only the reports' own take part; the first report is the first host's."""
    port = free_port()
    threads = [threading.Thread(target=report_to, args=(("127.0.0.1", port), report, 20)) for report in reports[1:]]
    for thread in threads:
        thread.start()
    found = collect(reports[0], hosts, port, shared, seconds)
    for thread in threads:
        thread.join()
    return found


def test_all_hosts_are_heard_in_their_order() -> None:
    reports = [Report(f"n{number}", ["torch 2"], memory_gib=number) for number in range(6)]
    hosts = [report.host for report in reports]
    found = called(hosts, [reports[0], *reversed(reports[1:])])
    assert [(report.host, report.memory_gib) for report in found] == [(f"n{n}", n) for n in range(6)]
    assert judge(found) == []


def test_hosts_that_meet_on_the_loopback_are_one_machine() -> None:
    """Nodes with names of their own in namespaces of one machine: for them such an address is good."""
    reports = [Report(f"n{n}", ["torch 2"], machine=f"n{n}", address=f"127.0.1.{n}") for n in (1, 2)]
    assert judge(called(["n1", "n2"], reports)) == []


def test_a_silent_host_is_named() -> None:
    found = called(["n1", "n2", "n3"], [Report("n1", ["torch 2"]), Report("n3", ["torch 2"])], seconds=2)
    assert judge(found) == ["n2: no answer: it cannot start Python here, or cannot reach n1"]


def test_a_first_host_that_cannot_be_reached() -> None:
    assert not report_to(("127.0.0.1", free_port()), Report("n2", []), seconds=0.5)


def test_what_differs_from_the_first_host_is_named() -> None:
    first = Report("n1", ["python 3.11.7", "torch 2.13.0"], gpus=["H100 80 GiB"] * 8)
    other = Report("n2", ["python 3.11.7", "torch 2.12.0"], gpus=["H100 80 GiB"] * 7, problems=["no memory"])
    assert judge([first, other]) == [
        "n2: no memory",
        "n2: torch 2.12.0 where n1 has torch 2.13.0",
        f"n2: GPUs {['H100 80 GiB'] * 7} where n1 has {['H100 80 GiB'] * 8}",
    ]


def test_a_name_that_means_the_machine_itself_is_no_address_for_others() -> None:
    """As Debian writes it into /etc/hosts; the nodes of one machine, as in a test, may well meet there."""
    first = Report("n1", ["torch 2"], machine="alpha", address="10.0.0.1")
    alike = Report("n2", ["torch 2"], machine="alpha", address="127.0.1.1")
    assert judge([first, alike]) == []
    (line,) = judge([first, Report("n2", ["torch 2"], machine="beta", address="127.0.1.1")])
    assert line.startswith("n2: the name beta means 127.0.1.1 there, which no other machine can reach")


@pytest.mark.parametrize("skew", [7.0, -7.0])
def test_a_clock_that_is_off_is_measured(skew: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other host asks in another thread, whose clock is shifted."""
    port, here, clock = free_port(), threading.current_thread(), time.time
    monkeypatch.setattr(roll_call.time, "time", lambda: clock() + (0 if threading.current_thread() is here else skew))
    other = threading.Thread(target=report_to, args=(("127.0.0.1", port), Report("n2", ["torch 2"])))
    other.start()
    found = collect(Report("n1", ["torch 2"]), ["n1", "n2"], port)
    other.join()
    assert found[1].clock_skew == pytest.approx(skew, abs=0.5)
    (line,) = judge(found)
    assert line == f"n2: its clock is {skew:+.1f} s off that of n1"


def test_a_run_folder_that_is_not_shared_is_named(tmp_path: Path) -> None:
    """Seen from the other host, which is played by hand, the first one's file does not exist."""
    port, reports = free_port(), []
    thread = threading.Thread(
        target=lambda: reports.extend(collect(Report("n1", ["t"]), ["n1", "n2"], port, tmp_path / "runs" / "x"))
    )
    thread.start()
    deadline = time.monotonic() + 20
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port))
            break
        except OSError:
            assert time.monotonic() < deadline
    with connection, connection.makefile("rw") as stream:
        stream.write('{"host": "n2"}\n')
        stream.flush()
        answer = json.loads(stream.readline())
        assert Path(answer["file"]).parent == tmp_path and Path(answer["file"]).exists()
    other = Report("n2", ["t"])
    Path(answer["file"]).rename(tmp_path / "elsewhere")
    assert report_to(("127.0.0.1", port), other, 20)
    thread.join()
    assert judge(reports) == [f"n2: {tmp_path} is not the folder that n1 sees there"]
    (tmp_path / "elsewhere").unlink()
    assert list(tmp_path.iterdir()) == []


def put_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str = NVIDIA_SMI) -> None:
    (folder / "nvidia-smi").write_text(script)
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_gpus_in_use_and_missing_ones_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch)
    monkeypatch.setenv("SLURMD_NODENAME", "gpu07")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    monkeypatch.setattr(doctor, "torch_is_for_cpus", lambda: False)
    report = examine(None, None, quick=True)
    assert report.host == "gpu07"
    assert report.gpus == ["NVIDIA H100 80GB HBM3 80 GiB"] * 2
    assert report.problems == ["GPU 1: 39 of 80 GiB are in use", "SLURM gave 8 GPUs, nvidia-smi shows 2"]
    assert report.line().startswith("gpu07: 2 x NVIDIA H100 80GB HBM3 80 GiB, ")


def test_only_the_jobs_own_gpus_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a shared node the others are busy, and rightly."""
    asked = tmp_path / "asked"
    script = f"#!/bin/sh\necho \"$@\" > {asked}\nprintf 'NVIDIA GB10, [N/A], [N/A]\\n'\n"
    put_nvidia_smi(tmp_path, monkeypatch, script)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(doctor, "torch_is_for_cpus", lambda: False)
    report = examine(None, None, quick=True)
    assert asked.read_text().split()[-1] == "--id=3"
    assert (report.gpus, report.problems) == (["NVIDIA GB10"], [])


def test_gpus_without_a_torch_for_them_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch)
    monkeypatch.setattr(doctor, "torch_is_for_cpus", lambda: True)
    assert not any("without CUDA" in line for line in examine(None, None, quick=True).problems)
    assert any("cannot use the GPUs" in line for line in examine(None, None, quick=False).problems)
    with monkeypatch.context() as hidden:
        hidden.setenv("CUDA_VISIBLE_DEVICES", "")
        hidden.setenv("SLURM_GPUS_ON_NODE", "2")
        assert examine(None, None, quick=False).problems == []
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    problem = examine(None, None, quick=True).problems[-1]
    assert problem.startswith("SLURM gave 2 GPUs, torch ") and problem.endswith(" is built without CUDA")


def test_ranks_that_do_not_fit_are_a_mistake() -> None:
    with pytest.raises(UserError, match="got 8 for 3 ranks"):
        examine(small_config(), 3, quick=True)


def test_want_of_memory_and_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LEAST_MEMORY", 2**60)
    monkeypatch.setattr(doctor, "LEAST_DISK", 2**60)
    report = examine(small_config(train={"run_dir": tmp_path / "run"}), 4, quick=True)
    assert len(report.problems) == 3
    assert report.problems[0].endswith("GiB of memory are free")
    assert report.problems[1].endswith(f"GiB are free where train.run_dir {tmp_path / 'run'} lies")
    assert report.problems[2] == "data.path is missing"


def test_the_command() -> None:
    output = fastslow("doctor", "--quick")
    assert output.splitlines()[-1] == "nothing found that would stop a run"
    assert "torch" in output
    assert "/nowhere.yaml does not exist" in refused("doctor", "/nowhere.yaml")
