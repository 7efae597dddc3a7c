"""Loggers of nodes without rclpy: Python's logging, with lines formatted like rclpy's."""

from __future__ import annotations

import logging
import sys

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
        return sys.stderr


def node_logger(name: str, level: str = "info") -> logging.Logger:
    """Return the logger of the node with this full name."""
    root = logging.getLogger(_ROOT)
    if not any(isinstance(handler, _Stderr) for handler in root.handlers):
        handler = _Stderr()
        handler.setFormatter(_Format())
        root.addHandler(handler)
    logger = root.getChild(name.strip("/").replace("/", "."))
    logger.setLevel(_LEVELS[level])
    # If ROS's `launch` is imported, new loggers of the process do not propagate by default.
    root.propagate = logger.propagate = True
    return logger
