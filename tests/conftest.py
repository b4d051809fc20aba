"""What all tests share: no silent skips when asked, one thread a process, no network, what may run side by side."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Any

import pytest

# Several ranks on few cores: more threads only slow them down, and the number of threads changes the last bits of sums.
# Set before anything imports torch; child processes inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test makes the whole run fail")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2`: tests that start ranks one after another, the files of one-process tests beside them."""
    from xdist.scheduler import LoadFileScheduling

    class RanksTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return super()._split_scope(nodeid) if nodeid.startswith("tests/unit/") else "ranks"

    return RanksTogether(config, log)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    skipped = _skipped(session.config)
    if session.config.getoption("--no-skips") and skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    skipped = _skipped(config)
    if config.getoption("--no-skips") and skipped:
        terminalreporter.write_line(f"--no-skips: {len(skipped)} skipped, which counts as a failure", red=True)


def _skipped(config: pytest.Config) -> list[Any]:
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    return reporter.stats.get("skipped", []) if reporter else []


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections of this process stay on this machine."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(address[0]):
            raise OSError(f"a test tried to reach {address[0]}: tests run without a network")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)


def _is_local(host: str) -> bool:
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or host in _own_addresses()


def _own_addresses() -> set[str]:
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return set()
