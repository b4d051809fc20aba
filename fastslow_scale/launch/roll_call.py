"""All machines of a job report to the first one, which compares them and names those that would stop the run.

Started as one process per node (`srun --ntasks-per-node=1 fastslow doctor ...`). Each connects to the first node on the
port that training will use, so a network that would stop the run shows as well. The first node answers with its time,
from which the other tells how far its own clock is off, and with a file that both must see.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastslow_scale.launch.doctor import Report

SECONDS = 60.0
MOST_SKEW = 2.0


def report_to(address: tuple[str, int], report: Report, seconds: float = SECONDS) -> bool:
    """Hand this machine's report to the first one; False: it cannot be reached."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection(address, timeout=seconds) as connection:
                _exchange(connection, report)
            return True
        except (OSError, ValueError):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)


def _exchange(connection: socket.socket, report: Report) -> None:
    with connection.makefile("rw", encoding="utf-8") as stream:
        asked = time.time()
        _send(stream, {"host": report.host})
        answer = json.loads(stream.readline())
        answered = time.time()
        report.clock_skew = round((asked + answered) / 2 - answer["time"], 3)
        if connection.getpeername()[0].startswith("127."):
            report.machine = ""  # the same machine under another name: they meet there
        if answer["file"] and not Path(answer["file"]).exists():
            report.problems.append(f"{Path(answer['file']).parent} is not the folder that {answer['from']} sees there")
        _send(stream, report.to_dict())
        stream.readline()  # the other end has it


def collect(
    own: Report, hosts: Sequence[str], port: int, shared: Path | None = None, seconds: float = SECONDS
) -> list[Report]:
    """On the first machine: the reports of all `hosts`, in their order; a silent one has that as its problem.

    shared: a folder that all machines must see as the same one.
    """
    reports = {own.host: own}
    with _visible_file(shared) as file, socket.create_server(("", port), backlog=len(hosts) + 8) as server:
        deadline = time.monotonic() + seconds
        while len(reports) < len(hosts) and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(10)
                    report = _receive(connection, {"time": 0.0, "file": file, "from": own.host})
                    reports[report.host] = report
    silent = "no answer: it cannot start Python here, or cannot reach " + own.host
    return [reports.get(host) or Report(host, [], problems=[silent]) for host in hosts]


def _receive(connection: socket.socket, answer: dict[str, Any]) -> Report:
    with connection.makefile("rw", encoding="utf-8") as stream:
        stream.readline()
        _send(stream, answer | {"time": time.time()})
        report = Report(**json.loads(stream.readline()))
        _send(stream, {})
        return report


def _send(stream: Any, content: Mapping[str, Any]) -> None:
    stream.write(json.dumps(content) + "\n")
    stream.flush()


@contextlib.contextmanager
def _visible_file(folder: Path | None) -> Iterator[str | None]:
    if folder is None:
        yield None
        return
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    try:
        number, name = tempfile.mkstemp(prefix=".seen-by-all-nodes-", dir=there)
    except OSError:  # the report says that it cannot be written
        yield None
        return
    os.close(number)
    try:
        yield name
    finally:
        Path(name).unlink(missing_ok=True)


def judge(reports: Sequence[Report]) -> list[str]:
    """`host: what` for everything that would stop the run, differences from the first machine included."""
    first, lines = reports[0], []
    several = len({report.machine for report in reports if report.machine}) > 1
    for report in reports:
        lines += [f"{report.host}: {problem}" for problem in report.problems]
        if not report.versions:
            continue
        lines += [
            f"{report.host}: {there} where {first.host} has {here}"
            for there, here in zip(report.versions, first.versions, strict=True)
            if there != here
        ]
        if report.gpus != first.gpus:
            lines.append(f"{report.host}: GPUs {report.gpus} where {first.host} has {first.gpus}")
        if several and report.address.startswith("127."):
            lines.append(
                f"{report.host}: the name {report.machine} means {report.address} there, which no other machine can "
                "reach: mend /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface of the network"
            )
        if abs(report.clock_skew) > MOST_SKEW:
            lines.append(f"{report.host}: its clock is {report.clock_skew:+.1f} s off that of {first.host}")
    return lines
