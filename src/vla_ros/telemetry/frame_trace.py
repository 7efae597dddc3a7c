"""One line per frame, from camera to command, found again by the frame's stamp.

A disk that is full, slow or gone never holds up a command: lines wait in a bounded queue for a thread of their
own, and the first error ends the recording with one line in the log.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from vla_ros.control.outcome import FrameOutcome
from vla_ros.errors import ConfigError

_WAITING = 4096  # lines
_PATIENCE = 0.5  # s between writes


class FrameTrace:
    """Writes JSON lines: ``stamp``, ``camera``, ``outcome``, ``times`` (ROS clock, ns) and ``stages_ms``.

    Values are those of :class:`~vla_ros.control.outcome.FrameOutcome`; a command carries the stamp of its frame.

    Args:
        path: File to write; an old one is replaced.
        complain: Told once when nothing can be written any more.

    Attributes:
        lost: Lines that were not written.

    Raises:
        ConfigError: The file cannot be opened.
    """

    def __init__(self, path: str | Path, complain: Callable[[str], object]) -> None:
        self._path = path
        self._complain = complain
        try:
            self._file: IO[str] | None = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"node.trace: '{path}' cannot be written ({error.strerror})") from None
        self._lines: deque[str] = deque()
        self._changed = threading.Condition()
        self._ending = False
        self.lost = 0
        self._thread = threading.Thread(target=self._run, name="vla_trace", daemon=True)
        self._thread.start()

    def frame(self, outcome: FrameOutcome) -> None:
        """Note what became of a frame; never waits for the disk."""
        sent = {} if outcome.ended is None else {"sent": outcome.ended}
        line = json.dumps(
            {
                "stamp": outcome.stamp,
                "camera": outcome.camera,
                "outcome": outcome.outcome,
                "times": {"received": outcome.received, **sent},
                "stages_ms": {name: round(value, 3) for name, value in outcome.stages_ms.items()},
            }
        )
        with self._changed:
            if self._file is None or len(self._lines) >= _WAITING:
                self.lost += 1
                return
            self._lines.append(line)

    def close(self) -> None:
        """Write what waits and end. Safe to call twice."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join(5)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ending, _PATIENCE)
                ending, lines = self._ending, list(self._lines)
                self._lines.clear()
            if not self._write(lines) or ending:
                break
        self._leave()

    def _write(self, lines: list[str]) -> bool:
        assert self._file is not None
        try:
            self._file.writelines(f"{line}\n" for line in lines)
            self._file.flush()
        except OSError as error:
            self.lost += len(lines)
            self._complain(
                f"node.trace: '{self._path}' cannot be written any more ({error.strerror}); recording has ended, "
                "the arm is not affected"
            )
            return False
        return True

    def _leave(self) -> None:
        with self._changed:
            file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # the disk is still full; it was said already
                file.close()
