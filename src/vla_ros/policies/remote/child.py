"""Runs our policy server as a child process with another Python; it ends with this process."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from vla_ros.errors import ServerLostError
from vla_ros.policies.remote.link import pause

logger = logging.getLogger(__name__)

_PROGRAM = "import sys; from vla_ros.cli.main import main; sys.exit(main(sys.argv[1:]))"
_SERVING = re.compile(r"serving \S+ on ws://[^:]+:(\d+)")
_REMEMBERED = 5  # lines of the child's log
_END = 10.0  # s until a child that was told to end is killed


class ServerProcess:
    """Runs ``vla-ros serve`` with another Python and restarts it when it dies.

    It listens on loopback and requires a key that only this process knows. It reads from a pipe held by this
    process and ends when the pipe closes, however this process ends. ``key_file`` is the file with the key.
    """

    def __init__(self, python: Path, arguments: Sequence[str]) -> None:
        self._python, self._arguments = python, arguments
        self._folder = Path(tempfile.mkdtemp(prefix="vla_ros_"))
        self.key_file = self._folder / "key"
        self.key_file.touch(mode=0o600)
        self.key_file.write_text(secrets.token_urlsafe(24), encoding="ascii")
        self._lines: deque[str] = deque(maxlen=_REMEMBERED)
        self._port = 0
        self._process: subprocess.Popen[str] | None = None
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._log: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The server's address."""
        return f"ws://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start the process and wait until its policy is loaded, which may take minutes.

        Raises ServerLostError with the last lines of output if the process ended.
        """
        self._port = self._start()
        self._watcher = threading.Thread(target=self._watch, name="vla_child", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        """Process id of the running or last process; 0 before the first."""
        return self._process.pid if self._process else 0

    def close(self) -> None:
        """End the process."""
        self._closing.set()
        process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for thread in (self._watcher, self._log):
            if thread is not None:
                thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> int:
        """Start the process; return its port once it serves."""
        command = [str(self._python), "-c", _PROGRAM, "serve", *self._arguments, "--with-parent"]
        command += ["--port", str(self._port), "--api-key-file", str(self.key_file)]
        self._lines.clear()
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        except OSError as error:
            raise ServerLostError(f"{self._python}: cannot be started ({error.strerror})") from None
        self._process = process
        assert process.stdout is not None
        for line in process.stdout:
            found = _SERVING.match(line)
            if found:
                self._log = threading.Thread(
                    target=self._forward, args=(process,), daemon=True, name="vla_child_log"
                )
                self._log.start()
                return int(found[1])
            self._heard(line)
        with process:  # closes the pipes
            status = process.wait()
        said = " | ".join(self._lines) or "nothing"
        raise ServerLostError(f"{self._python}: ended with status {status} before it served; it said: {said}")

    def _forward(self, process: subprocess.Popen[str]) -> None:
        """Log the process's output until it ends."""
        assert process.stdout is not None
        with process:  # closes the pipes
            for line in process.stdout:
                self._heard(line)

    def _heard(self, line: str) -> None:
        self._lines.append(line.rstrip())
        logger.info("%s: %s", self._python.name, line.rstrip())

    def _watch(self) -> None:
        """Restart the process on the same port whenever it ends, with growing pauses while it fails."""
        failures = 0
        while not self._closing.is_set():
            assert self._process is not None
            status = self._process.wait()
            if self._closing.wait(pause(failures)):
                return
            logger.error("the policy's process ended with status %d; starting it again", status)
            try:
                self._start()
                failures = 0
            except ServerLostError as error:
                logger.error("%s", error)
                failures += 1
