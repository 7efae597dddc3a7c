"""Loggers of nodes without rclpy: Python's logging, lines as rclpy writes them."""

from __future__ import annotations

import logging
import sys
import threading
import time

_ROOT = "vla_ros.node"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}


class _Format(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        name = record.name.removeprefix(_ROOT + ".")
        level = {"WARNING": "WARN", "CRITICAL": "FATAL"}.get(record.levelname, record.levelname)
        text = f"[{level}] [{record.created:.9f}] [{name}]: {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the current standard error, which test runners and progress bars replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> object:
        """The current standard error."""
        return sys.stderr


class NodeLogger:
    """The members of ``rclpy``'s logger that this package uses."""

    def __init__(self, name: str, level: str = "info") -> None:
        root = logging.getLogger(_ROOT)
        if not any(isinstance(handler, _Stderr) for handler in root.handlers):
            handler = _Stderr()
            handler.setFormatter(_Format())
            root.addHandler(handler)
        self._logger = root.getChild(name.strip("/").replace("/", "."))
        self._logger.setLevel(_LEVELS[level])
        # If ROS's `launch` is imported, new loggers of the process do not propagate by default.
        root.propagate = self._logger.propagate = True
        self._said: dict[str, float] = {}
        self._lock = threading.Lock()

    def debug(self, message: str, *, throttle_duration_sec: float = 0.0) -> None:
        """Log for developers; at most once in ``throttle_duration_sec``."""
        self._say(logging.DEBUG, message, throttle_duration_sec)

    def info(self, message: str, *, throttle_duration_sec: float = 0.0) -> None:
        """Log for everybody; at most once in ``throttle_duration_sec``."""
        self._say(logging.INFO, message, throttle_duration_sec)

    def warning(self, message: str, *, throttle_duration_sec: float = 0.0) -> None:
        """Log a warning; at most once in ``throttle_duration_sec``."""
        self._say(logging.WARNING, message, throttle_duration_sec)

    def error(self, message: str, *, throttle_duration_sec: float = 0.0) -> None:
        """Log an error; at most once in ``throttle_duration_sec``."""
        self._say(logging.ERROR, message, throttle_duration_sec)

    def exception(self, message: str) -> None:
        """Log ``message`` as an error, with the traceback of the current exception."""
        self._logger.error(message, exc_info=True)

    def _say(self, level: int, message: str, throttle: float) -> None:
        if throttle > 0.0:
            # As rclpy does, by place; the message's beginning stands for the place here.
            place, now = message[:40], time.monotonic()
            with self._lock:
                if now - self._said.get(place, -throttle) < throttle:
                    return
                self._said[place] = now
        self._logger.log(level, message)
