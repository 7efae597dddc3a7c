"""Runs a recorder as a process beside the node, and passes it what the node receives and sends."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from logging import Logger
from operator import attrgetter
from pathlib import Path
from typing import Any

from vla_ros.config import Config
from vla_ros.errors import ConfigError, MissingDependencyError, VlaRosError, install
from vla_ros.graph.launcher import launched
from vla_ros.graph.node import Node
from vla_ros.graph.qos import profile
from vla_ros.graph.wiring import Wiring
from vla_ros.record.ring import Ring
from vla_ros.record.topics import LATCHED, Recorded, Topic, recorded_topics

_PERIOD = 0.02  # s between passes to the recorder; a killed node loses the messages of one
_AGAIN = 2.0  # s from one start of the recorder to the next
_ENDS = 15.0  # s; the recorder, which may still be starting, finishes its bag
_SHARE, _LEAST = 8, 64  # part of record.memory that is shared with the recorder, and at least so many MiB


def record(config: Config, node: Node, wiring: Wiring) -> None:
    """Start the recorder of a node, if ``record.what`` asks for one; it ends when everything else is closed.

    Call it before the endpoints are created. Raises VlaRosError if it does not start.
    """
    check_recorder(config)
    if config.record.what != "none":
        topics = recorded_topics(config, node.resolve_topic_name)
        try:
            recorder = RecorderProcess(config, node.get_fully_qualified_name(), topics, node.get_logger())
        except OSError as error:
            raise VlaRosError(f"record.what: {config.record.what}: no recorder starts: {error}") from error
        wiring.on_close(recorder.close)
        wiring.taps.update({topic.name: partial(recorder.hear, topic.name) for topic in topics})


def check_recorder(config: Config) -> None:
    """Raise an error if ``record.what`` asks for a recorder that could write nothing.

    Raises MissingDependencyError if its library is not installed, and ConfigError if nothing can be written to
    ``record.folder``.
    """
    if config.record.what == "none":
        return
    try:
        import vla_ros.record.bag  # noqa: F401
    except ImportError as error:
        found = f"record.what: {config.record.what}: {error}"
        raise MissingDependencyError(f"{found}; install it with: {install('replay')}") from error
    folder = Path(config.record.folder).absolute()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        what = "cannot be written; check its permissions" if there.is_dir() else "is no folder"
        raise ConfigError(f"record.folder: found {config.record.folder}, but {there} {what}")


class RecorderProcess:
    """A recorder that ends with this process, and is started again if it is killed before.

    A thread of its own passes the messages on, so that no other thread copies them or waits.
    """

    def __init__(self, config: Config, node: str, topics: Sequence[Topic], logger: Logger) -> None:
        record, self._logger = config.record, logger
        self._size = max(record.memory // _SHARE, _LEAST) << 20
        self._topics = [topic.name for topic in topics]
        options = {f"record.{name}": value for name, value in vars(record).items()}
        options |= {"node.backend": config.node.backend, "node.log_level": config.node.log_level}
        self._command = [sys.executable, "-m", "vla_ros.cli", "record", "--node", node]
        for name, value in options.items():
            self._command += ["-p", f"{name}:={json.dumps(value)}"]
        for topic in topics:
            self._command += ["--topic", *topic]
        self._waiting: deque[Recorded] = deque()
        self._latched = {t.name: deque[Recorded](maxlen=profile(t.qos).depth) for t in topics if t.qos in LATCHED}
        self._ended = threading.Event()
        self._start()
        self._thread = threading.Thread(target=self._run, name="vla_recorder", daemon=True)
        self._thread.start()

    def hear(self, topic: str, cdr: Any, published: int) -> None:
        """Record a message that was received or sent now; ``published`` is in nanoseconds, 0 for now."""
        now = time.time_ns()
        self._waiting.append(Recorded(now, published or now, topic, cdr))

    def close(self) -> None:
        """Tell the recorder to finish its bag, and wait for that."""
        self._ended.set()
        self._thread.join(_ENDS)
        self._process.terminate()
        try:
            self._process.wait(_ENDS)
        except subprocess.TimeoutExpired:
            self._logger.error(f"the recorder did not finish its bag within {_ENDS:g} s; the next one repairs it")
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDS)
        if not self._thread.is_alive():
            self._ring.close()

    def _start(self) -> None:
        """Start a recorder, with a ring that begins with what a late subscriber would get."""
        self._ring, now = Ring.create(self._size, self._topics), time.time_ns()
        latched = sorted((message for each in self._latched.values() for message in each), key=attrgetter("time"))
        self._ring.write(message._replace(time=now) for message in latched)
        shared, self._started = self._ring.descriptor, time.monotonic()
        # A session of its own, so that Ctrl-C reaches the node first, whose last events are recorded.
        self._process = subprocess.Popen(
            [*self._command, "--ring", str(shared)],
            env={**os.environ, **launched()},
            start_new_session=True,
            pass_fds=[shared],
        )

    def _run(self) -> None:
        why = ""
        try:
            while not why and not self._ended.wait(_PERIOD):
                self._pass_on()
                why = self._watch()
            self._pass_on()
        except Exception as error:
            why = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        if why:
            self._logger.error(f"{why}: nothing is recorded any more")
        self._waiting = deque(maxlen=0)

    def _pass_on(self) -> None:
        messages = [self._waiting.popleft() for _ in range(len(self._waiting))]
        for message in messages:
            if message.topic in self._latched:
                self._latched[message.topic].append(message)
        self._ring.write(messages)

    def _watch(self) -> str:
        """Start the recorder again if it has ended; it repairs its bag. Return why it would end again, or "".

        One that was not killed, and ended within two seconds, does not start: its options or its Python are wrong.
        """
        status, early = self._process.poll(), time.monotonic() < self._started + _AGAIN
        if status is None or (status < 0 and early):
            return ""
        if status >= 0 and early:
            return f"the recorder has ended with status {status}"
        self._logger.error(f"the recorder has ended with status {status}: it is started again")
        before = self._ring
        self._start()
        before.close()
        return ""
