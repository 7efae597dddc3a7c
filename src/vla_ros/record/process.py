"""Runs a recorder as a process beside the node."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from logging import Logger

from vla_ros.config import Config
from vla_ros.graph.launcher import launched
from vla_ros.graph.node import Node
from vla_ros.graph.wiring import Wiring
from vla_ros.record.topics import Topic, recorded_topics

_WATCH = 2.0  # s between checks that the recorder runs
_ENDS = 10.0  # s; the recorder finishes its bag


def record(config: Config, node: Node, wiring: Wiring) -> None:
    """Start the recorder of a node, if ``record.what`` asks for one; it ends when everything else is closed."""
    if config.record.what != "none":
        topics = recorded_topics(config, node.resolve_topic_name)
        recorder = RecorderProcess(config, node.get_fully_qualified_name(), topics, node.get_logger())
        wiring.undo(recorder.close)
        wiring.timer(_WATCH, recorder.watch)


class RecorderProcess:
    """A recorder that ends with this process, and is started again if it is killed before."""

    def __init__(self, config: Config, node: str, topics: Sequence[Topic], logger: Logger) -> None:
        record, self._logger = config.record, logger
        options = {f"record.{name}": value for name, value in vars(record).items()}
        options |= {"node.backend": config.node.backend, "node.log_level": config.node.log_level}
        self._command = [sys.executable, "-m", "vla_ros.cli", "record", "--node", node]
        for name, value in options.items():
            self._command += ["-p", f"{name}:={json.dumps(value)}"]
        for topic in topics:
            self._command += ["--topic", *topic]
        self._over = False
        self._process = self._start()

    def watch(self) -> None:
        """Start the recorder again if it was killed; it repairs its bag."""
        status = self._process.poll()
        if status is None or self._over:
            return
        self._over = status >= 0  # it ended by itself, and would again
        then = "nothing is recorded any more" if self._over else "it is started again"
        self._logger.error(f"the recorder has ended with status {status}: {then}")
        if not self._over:
            self._process = self._start()

    def close(self) -> None:
        """Let the recorder finish its bag."""
        self._process.terminate()
        try:
            self._process.wait(_ENDS)
        except subprocess.TimeoutExpired:
            self._logger.error(f"the recorder did not finish its bag within {_ENDS:g} s; the next one repairs it")
            self._process.kill()
            self._process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        # A session of its own, so that Ctrl-C reaches the node first, whose last events are recorded.
        return subprocess.Popen(self._command, env={**os.environ, **launched()}, start_new_session=True)
