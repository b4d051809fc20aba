"""A real SLURM of virtual CPU nodes on this machine, for tests. tests/lab/up.sh says what it is made of."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

from tests.commands import REPOSITORY, environment

SCRIPTS = Path(__file__).parent / "lab"
PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
}

T = TypeVar("T")


def missing() -> str | None:
    """Why there can be no lab here, in one line that says how to get one; None: there can be one."""
    packages = [package for program, package in PACKAGES.items() if shutil.which(program, path=_path()) is None]
    if packages:
        return f"no SLURM here: apt-get install --no-install-recommends {' '.join(packages)}"
    if os.geteuid() != 0:
        return "the SLURM of these tests needs namespaces, hence root"
    return None


def _path() -> str:
    return f"{os.environ['PATH']}{os.pathsep}/usr/sbin"


def wait_for(what: str, look: Callable[[], T | None], seconds: float = 300) -> T:
    """The first value that says something: not None, False or empty."""
    deadline = time.monotonic() + seconds
    while True:
        value = look()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.2)


class Lab:
    """A running cluster; `stop` ends exactly the processes that were started for it."""

    def __init__(self, folder: Path, nodes: int, accounting: bool = False):
        self.folder, self.nodes = folder, nodes
        command = [SCRIPTS / "up.sh", folder, str(nodes), str(_free_ports(nodes))]
        self._script(*command, *(["accounting"] if accounting else []))

    def stop(self) -> None:
        self._script(SCRIPTS / "down.sh", self.folder)

    def kill_node(self, name: str) -> None:
        """As if its power were cut: SIGKILL to the node's namespace, and so to everything in it."""
        os.kill(self._pid(name), signal.SIGKILL)

    def start_node(self, name: str) -> None:
        self._script(SCRIPTS / "node.sh", self.folder, name)

    def inside_node(self, name: str, *command: object) -> None:
        """Run a command that sees the node's own mounts."""
        init = psutil.Process(self._pid(name)).children()[0].pid
        subprocess.run(["nsenter", "--mount", f"--target={init}", *map(str, command)], check=True, timeout=30)

    def processes(self, name: str, words: str) -> list[psutil.Process]:
        """Those in a node whose command line has these words."""
        return [
            process
            for process in psutil.Process(self._pid(name)).children(recursive=True)
            if words in " ".join(process.cmdline())
        ]

    def ask(self, *command: object, status: int = 0, **variables: str) -> str:
        """Run one of SLURM's commands; what it printed."""
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            timeout=60,
            env=self.environment() | variables,
            cwd=REPOSITORY,
            check=False,
        )
        assert done.returncode == status, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def sbatch(self, *arguments: object, **variables: str) -> str:
        """The id of a job submitted from the repository's root."""
        return self.ask("sbatch", "--parsable", *arguments, **variables).strip()

    def submit(self, *arguments: object, status: int = 0, **variables: str) -> str:
        return self.ask(*submit_command(*arguments), status=status, **variables)

    def environment(self) -> dict[str, str]:
        own = {name: value for name, value in environment().items() if not name.startswith(("SLURM", "SBATCH"))}
        return own | {"SLURM_CONF": str(self.folder / "etc" / "slurm.conf"), "PATH": _path()}

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says, by its own words."""
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job", "--oneliner", number)))

    def ended(self, number: str, seconds: float = 600) -> dict[str, str]:
        """Wait for a job to end for good."""
        final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY")

        def look() -> dict[str, str] | None:
            job = self.job(number)
            return job if job["JobState"] in final else None

        return wait_for(f"the end of job {number}", look, seconds)

    def _script(self, *command: object) -> None:
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=120, env=self._clean(), check=False
        )
        assert done.returncode == 0, f"{command[0]}\n{done.stdout}\n{done.stderr}"

    @staticmethod
    def _clean() -> dict[str, str]:
        return {"PATH": _path(), "HOME": os.environ.get("HOME", "/root")}

    def _pid(self, name: str) -> int:
        return int((self.folder / "pids" / name).read_text())


def submit_command(*arguments: object) -> list[str]:
    return [sys.executable, str(REPOSITORY / "launchers" / "submit.py"), *map(str, arguments)]


def _free_ports(nodes: int) -> int:
    """The first of a range whose ports up.sh takes; they lie below those that the system hands out by itself."""
    for _ in range(100):
        base = random.SystemRandom().randrange(30000, 32000)
        try:
            for offset in (17, 19, *range(101, 101 + nodes)):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("", base + offset))
        except OSError:
            continue
        return base
    raise AssertionError("no free ports")
