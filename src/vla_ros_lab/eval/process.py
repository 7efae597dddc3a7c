"""Runs a benchmark in a process, and a Python, of its own."""

import contextlib
import os
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vla_ros.errors import ConfigError, VlaRosError
from vla_ros.policies.remote.messages import WireError, pack, str_keys, text_map, unpack
from vla_ros_lab.eval import child

_LENGTH = struct.Struct(">Q")
_LARGEST = 256 << 20  # bytes of an answer: a few cameras of several megapixels
_PATIENCE = 5.0  # s for a clean end
_QUOTED = 6  # lines of output that an error quotes
_IMPORTS = ("ModuleNotFoundError", "ImportError")


class BenchmarkError(VlaRosError):
    """An environment raised an error, died, hung, or answered something else than before."""


class BenchmarkProcess:
    """Starts :mod:`vla_ros_lab.eval.child` with ``python`` and asks it; restarts it after it died or was killed.

    ``opening`` is the first request, repeated at each start. An answer may take ``patience`` seconds, the first one
    and the beginning of an episode ten times as long.
    """

    def __init__(self, python: str, opening: dict[str, Any], patience: float) -> None:
        self._python, self._opening, self._patience = python or sys.executable, opening, patience
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as this object)
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None

    def start(self) -> Any:
        """Start the process and return the answer to the opening request; raises BenchmarkError."""
        if not Path(self._python).exists():
            raise ConfigError(f"--python: '{self._python}' does not exist; expected the Python that has vla-eval")
        ours, theirs = socket.socketpair()
        # PYTHONPATH stays: it may name the benchmark's sources.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
        try:
            # A new session, so that Ctrl-C reaches only this process, which ends the other one.
            self._process = subprocess.Popen(
                [self._python, child.__file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"--python {self._python}: cannot be started ({error.strerror})") from None
        finally:
            theirs.close()
        self._link = ours
        return self._ask(self._opening, 10 * self._patience)

    def ask(self, request: dict[str, Any]) -> Any:
        """Return the answer to a request; raises BenchmarkError, after which the process may have to be started."""
        return self._ask(request, self._patience * (10 if request["do"] == "start" else 1))

    @property
    def alive(self) -> bool:
        return self._link is not None

    def _ask(self, request: dict[str, Any], patience: float) -> Any:
        if self._link is None:
            raise BenchmarkError("the benchmark's process is not running")
        try:
            body = pack(request, str_keys)
            self._link.settimeout(patience)
            self._link.sendall(_LENGTH.pack(len(body)) + body)
            (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
            if size > _LARGEST:
                raise WireError(f"an answer of {size} bytes, allowed {_LARGEST}")
            answer = text_map(unpack(self._read(size)), "the answer")
        except TimeoutError:
            self.kill()
            raise BenchmarkError(f"no answer to '{request['do']}' within {patience:g} s (--step-timeout)") from None
        except (OSError, EOFError):
            status = self.kill()
            raise BenchmarkError(f"the process ended with status {status}; {self._last_lines()}") from None
        except WireError as error:
            self.kill()
            raise BenchmarkError(f"damaged answer: {error}") from None
        if "error" not in answer:
            return answer
        failure = str(answer["error"])
        if any(name in failure for name in _IMPORTS):
            failure += f"; are the benchmark's packages and variables those of {self._python} (--python)?"
        raise BenchmarkError(failure)

    def _read(self, size: int) -> bytes:
        assert self._link is not None
        data = bytearray()
        while len(data) < size:
            part = self._link.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def kill(self, patience: float = 0.0) -> int:
        """End the process, after ``patience`` seconds by force; return its status."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
        if self._process is None:
            return 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience or 0.5)
        self._process.kill()
        return self._process.wait()

    def close(self) -> None:
        """End the process: it closes its benchmark when its socket is closed."""
        self.kill(_PATIENCE)
        self._output.close()

    def _last_lines(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()[-_QUOTED:]
        return "its last lines: " + " | ".join(lines) if lines else "it printed nothing"
