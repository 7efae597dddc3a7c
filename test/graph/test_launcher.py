import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from vla_ros.graph.launcher import VARIABLE, end_with_launcher, wait_for_end

CHILD = """
import os, signal, sys, threading
told = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: (print("in order", flush=True), told.set()))
from vla_ros.graph.launcher import VARIABLE, end_with_launcher
end_with_launcher()
print(os.getpid(), VARIABLE in os.environ, flush=True)
while not told.wait(0.05):
    pass
"""
LAUNCHER = """
import os, subprocess, sys
from vla_ros.graph.launcher import launched
subprocess.Popen([sys.executable, "-c", sys.argv[1]], env={**os.environ, **launched()}).wait()
"""
PATIENCE = 20.0


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen([sys.executable, "-c", LAUNCHER, CHILD], stdout=subprocess.PIPE, text=True)
    yield started
    started.kill()
    started.wait()
    assert started.stdout is not None
    started.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_child_ends_in_order_when_its_launcher_is_killed(
    launcher: subprocess.Popen[str], number: signal.Signals
) -> None:
    """Not reaped here, the launcher stays a zombie, whose id still answers."""
    assert launcher.stdout is not None
    pid, inherited = launcher.stdout.readline().split()
    assert inherited == "False", "what the child starts has another launcher"
    launcher.send_signal(number)
    assert launcher.stdout.readline() == "in order\n"
    assert wait_for_end(int(pid), PATIENCE)


def test_a_launcher_that_has_already_ended_ends_the_child(monkeypatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environment = {**os.environ, VARIABLE: str(gone.pid)}
    child = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert "in order" in child.stdout
    assert f"the launcher (process {gone.pid}) is gone: ending" in child.stderr
    assert wait_for_end(gone.pid, 0.0)
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    assert wait_for_end(gone.pid, 0.0)


def test_waiting_for_a_running_process_ends_at_the_timeout(monkeypatch) -> None:
    assert not wait_for_end(os.getpid(), 0.01)
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    assert not wait_for_end(os.getpid(), 0.01)


@pytest.mark.parametrize("environment", [{}, {VARIABLE: "no number"}])
def test_without_a_launcher_nothing_is_watched(environment: dict[str, str]) -> None:
    end_with_launcher(environment)
    assert environment == {}
