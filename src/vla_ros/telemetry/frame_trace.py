"""Writes one line per frame with its times from camera to command.

A full, slow or missing disk never delays a command: lines go through a bounded queue to a separate thread, and the
first error ends the recording with one line in the log.
"""

import contextlib
import json
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from vla_ros.control.outcome import FrameOutcome
from vla_ros.errors import ConfigError

_WAITING = 4096  # lines that may wait for the disk


class FrameTrace:
    """Writes the fields of each :class:`~vla_ros.control.outcome.FrameOutcome` as a line of JSON; times are in ns.

    ``complain`` is called once, with the error, if the file can no longer be written; ``lost`` counts missing
    lines. Raises ConfigError if the file cannot be opened.
    """

    def __init__(self, path: str | Path, complain: Callable[[str], object]) -> None:
        self._path = path
        self._complain = complain
        try:
            file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"node.trace: '{path}' cannot be written ({error.strerror})") from None
        self._lines: queue.Queue[str | None] = queue.Queue(_WAITING)
        self._failed = False
        self.lost = 0
        self._thread = threading.Thread(target=self._run, args=(file,), name="vla_trace", daemon=True)
        self._thread.start()

    def on_outcome(self, outcome: FrameOutcome) -> None:
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
        try:
            if self._failed:
                raise queue.Full
            self._lines.put_nowait(line)
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Write the remaining lines and close the file. May be called twice."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=5)
        self._thread.join(5)

    def _run(self, file: IO[str]) -> None:
        for line in iter(self._lines.get, None):
            if self._failed:
                self.lost += 1
                continue
            try:
                file.write(f"{line}\n")
                file.flush()
            except Exception as error:  # mostly an OSError; a thread that ended would say nothing
                self._failed = True
                self.lost += 1
                found = f"'{self._path}' can no longer be written ({getattr(error, 'strerror', None) or error!r})"
                self._complain(f"node.trace: {found}; recording has ended, the arm is not affected")
        self._failed = True
        with contextlib.suppress(OSError):  # the disk is still full, as reported
            file.close()
