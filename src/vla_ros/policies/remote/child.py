"""Runs this package's policy server in a child process with another Python."""

from __future__ import annotations

import logging
import os
import re
import secrets
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from vla_ros.errors import ServerLostError
from vla_ros.policies.remote.link import pause

logger = logging.getLogger(__name__)

_SERVING = re.compile(r"serving \S+ on ws://[^:]+:(\d+)")
_REMEMBERED = 5  # lines of the child's output that an error quotes
_TERMINATE = 10.0  # s between SIGTERM and SIGKILL


class ServerProcess:
    """Runs ``vla-ros serve`` with another Python and restarts it when it dies.

    The server listens on loopback and requires the API key ``key``, which it reads from a pipe, so that no file
    contains it. The server exits when this process does, even after SIGKILL, because the kernel then closes the
    pipe to the server's standard input.
    """

    def __init__(self, python: Path, arguments: Sequence[str]) -> None:
        self._python, self._arguments = python, arguments
        self.key = secrets.token_urlsafe(24)
        self._lines: deque[str] = deque(maxlen=_REMEMBERED)
        self._port = 0
        self._process: subprocess.Popen[str] | None = None
        self._closing = threading.Event()
        self._supervisor: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Process id of the current or last server process; 0 before :meth:`start`."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Start the process and wait until its policy is loaded, which may take minutes.

        Raises ServerLostError if the process cannot be started or exits; the error quotes its last lines of output.
        """
        process = self._start()
        self._supervisor = threading.Thread(target=self._supervise, args=(process,), name="vla_child", daemon=True)
        self._supervisor.start()

    def close(self) -> None:
        self._closing.set()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_TERMINATE)
            except subprocess.TimeoutExpired:
                self._process.kill()
        if self._supervisor is not None:
            self._supervisor.join()

    def _start(self) -> subprocess.Popen[str]:
        """Start a process and wait until it serves; restarts keep the same port."""
        key, writer = os.pipe()
        os.write(writer, self.key.encode())
        os.close(writer)
        command = [str(self._python), "-m", "vla_ros.cli", "serve", *self._arguments, "--with-parent"]
        command += ["--port", str(self._port), "--api-key-file", f"/dev/fd/{key}"]
        self._lines.clear()
        try:
            self._process = process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=_environment(),
                pass_fds=(key,),
            )
        except OSError as error:
            raise ServerLostError(f"{self._python}: cannot be started ({error.strerror})") from None
        finally:
            os.close(key)
        if self._closing.is_set():
            process.terminate()
        serving = self._log(process)
        if serving is None:
            output = " | ".join(self._lines) or "nothing"
            raise ServerLostError(
                f"{self._python}: exited with status {process.returncode} before it served; its output: {output}"
            )
        self._port = int(serving[1])
        return process

    def _log(self, process: subprocess.Popen[str]) -> re.Match[str] | None:
        """Log the output until the process serves; return None if it exits instead."""
        assert process.stdout is not None
        for line in process.stdout:
            if serving := _SERVING.match(line):
                return serving
            self._lines.append(line.rstrip())
            logger.info("%s: %s", self._python.name, line.rstrip())
        with process:  # closes the pipes and waits
            return None

    def _supervise(self, process: subprocess.Popen[str]) -> None:
        """Log the output; when the process exits, restart it with exponential backoff."""
        failures, starts = 0, False
        while True:
            try:
                process = self._start() if starts else process
                failures = 0
                self._log(process)
            except Exception as error:  # without this thread, nobody would restart it
                logger.error("%s", error, exc_info=not isinstance(error, ServerLostError))
                failures += 1
            if self._closing.wait(pause(failures)):
                return
            starts = process.poll() is not None
            if starts:
                logger.error("the policy process exited with status %d; restarting it", process.returncode)


def _environment() -> dict[str, str]:
    """Return this process's environment without the folders of libraries for this process's Python.

    A folder of ``PYTHONPATH`` that holds this package, as in a colcon workspace, remains.
    """
    own = Path(__file__).parents[3]
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [path for path in folders if path and Path(path).resolve() == own.resolve()]
    dropped = ("PYTHONPATH", "PYTHONHOME")
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**inherited, "PYTHONUNBUFFERED": "1", **({"PYTHONPATH": kept[0]} if kept else {})}
