"""Starts the other ranks of a model that is split over several GPUs, watches them, and ends them.

Rank 0 is the policy's own process. Every other rank is a child: ``python -m vla_ros_models.rank``. It loads
its shard as rank 0 does, through the same policy, and then obeys. A rank that dies, or does not take part in an
inference in time, ends the whole group: the inference raises DeviceLostError, and the policy must be loaded again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vla_ros.config import Config
from vla_ros.errors import DeviceLostError
from vla_ros.policies.options import NetworkOptions
from vla_ros_models.engine.device_errors import NotFiniteError
from vla_ros_models.engine.ranks import GroupOfRanks

logger = logging.getLogger(__name__)

LOADING = 900.0
"""Seconds that loading or capturing may take."""

SHARE_OF_TIMEOUT = 0.75
"""Part of ``timeouts.inference`` after which a rank that has not answered is lost."""

_POLL = 0.02  # s between two looks at the processes
MESSAGE = 1 << 17  # bytes; longest message
_ENDING = 3.0  # s until a rank that was told to end is killed


class _Child:
    """One other rank: its process and the socket to it."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vla_ros_models.rank", str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # a terminal's SIGINT is for the node, which ends its ranks
            )
        self.socket.setblocking(False)
        self.here = self.ready = False  # it runs; it has loaded its shard

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.process.pid}, {self.device})"

    @property
    def is_behind(self) -> bool:
        """True if it has not taken all orders yet, or is stopped."""
        unread = struct.unpack("i", fcntl.ioctl(self.socket, termios.TIOCOUTQ, b"\0\0\0\0"))[0]
        with suppress(OSError, IndexError):
            stat = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            return unread > 0 or stat[0] in "Tt"
        return True

    def read(self) -> str | None:
        """Return its message, "" if there is none, or None if the process has closed its socket."""
        try:
            return self.socket.recv(MESSAGE).decode() or None
        except BlockingIOError:
            return ""
        except OSError:
            return None

    def end(self, kill: bool) -> None:
        """Close the socket, which ends the process; kill it, at once or if it does not end."""
        self.socket.close()
        with suppress(subprocess.TimeoutExpired):
            if not kill:
                self.process.wait(_ENDING)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class LeadingRank(GroupOfRanks):
    """Rank 0: starts the others on ``devices[1:]``, leads and watches them.

    ``message`` describes the policy to them. Once loaded, an inference may take :data:`SHARE_OF_TIMEOUT` of the
    ``timeout`` in seconds. Raises VlaRosError if a rank cannot start.
    """

    def __init__(self, message: dict[str, Any], devices: Sequence[torch.device], timeout: float) -> None:
        self.lost = ""
        self._timeout, self._limit, self._deadline, self._ordered = (
            SHARE_OF_TIMEOUT * timeout,
            LOADING,
            float("inf"),
            False,
        )
        self._children: list[_Child] = []
        self._folder = Path(tempfile.mkdtemp(prefix="vla_ros_ranks_"))
        self._message, self._devices = {**message, "folder": str(self._folder)}, devices
        self._started, self._closing = threading.Event(), threading.Event()
        self._joined, self._aborting = False, threading.Lock()  # with the others over NCCL; while that ends
        # The kernel kills a child when the thread that started it ends, so that thread stays.
        self._watcher = threading.Thread(target=self._watch, name="vla_ranks", daemon=True)
        self._watcher.start()
        try:
            self._started.wait()
            self.check()
            super().__init__(0, len(devices), devices[0], self._folder)
            self._joined = True
            self.check()
        except BaseException as error:
            self.close()
            if self.lost and not isinstance(error, DeviceLostError):
                raise DeviceLostError(self.lost) from error
            raise

    def begin(self) -> None:
        """Limit the duration of inferences from now on."""
        self._limit = self._timeout

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks."""
        return [child.process.pid for child in self._children]

    def wait(self) -> None:
        """Wait until all ranks have loaded their shards. Raises DeviceLostError."""
        while not all(child.ready for child in self._children):
            self.check()
            time.sleep(_POLL)

    def tell(self, order: str) -> None:
        self._ordered = True
        if order.startswith("capture"):
            self._deadline = time.monotonic() + LOADING
        try:
            for child in self._children:
                child.socket.send(order.encode())
        except OSError as error:
            self._settle()
            raise DeviceLostError(self.lost or f"policy.gpus: a rank takes no orders: {error}") from None

    def check(self) -> None:
        if self.lost:
            raise DeviceLostError(self.lost)

    @contextmanager
    def running(self, loading: bool = False) -> Iterator[None]:
        self.check()
        self._ordered = False
        self._deadline = time.monotonic() + (LOADING if loading else self._limit)
        try:
            yield
        except NotFiniteError:  # all stages have run
            raise
        except Exception as error:
            if not self._ordered:  # nobody else has begun
                raise
            self._settle()
            self._fail(f"rank 0 failed while the others waited for it: {error}")
            raise DeviceLostError(self.lost) from error
        finally:
            self._deadline = float("inf")
        self.check()

    def close(self) -> None:
        self._closing.set()
        self._watcher.join()
        self._abort()

    def _settle(self) -> None:
        """Give the watcher time to see why a collective failed."""
        until = time.monotonic() + 0.5
        while not self.lost and time.monotonic() < until:
            time.sleep(_POLL)

    def _watch(self) -> None:
        try:
            for rank, device in enumerate(self._devices[1:], 1):
                child = _Child(rank, device)
                self._children.append(child)
                own = {**self._message, "rank": rank, "count": len(self._devices), "device": str(device)}
                with suppress(BrokenPipeError):  # it has ended already; :meth:`_look` says how
                    child.socket.send(json.dumps(own).encode())
            while not self._closing.is_set():
                self._look()
                self._closing.wait(_POLL)
        except Exception as error:
            self._fail(f"a rank cannot be started: {error}")
        finally:
            self._started.set()
            for child in self._children:
                child.end(kill=bool(self.lost))
            shutil.rmtree(self._folder, ignore_errors=True)

    def _look(self) -> None:
        """Read what the children say; fail if one has ended or is late."""
        for child in self._children:
            text = child.read()
            if text == "here":
                child.here = True
            elif text == "ready":
                child.ready = True
            elif text:
                self._fail(f"{child.name}: {text}")
            elif text is None:
                self._fail(f"{child.name} {_ending(child.process)}")
        if all(child.here for child in self._children):
            self._started.set()
        if time.monotonic() > self._deadline:
            behind = [child.name for child in self._children if child.is_behind]
            names = ", ".join(behind or [child.name for child in self._children])
            self._fail(f"{names} did not answer within {self._timeout:.2g} s")

    def _fail(self, why: str) -> None:
        """End all ranks, and with them the collectives that wait for them."""
        if self.lost:
            return
        for child in self._children:
            with suppress(OSError):
                child.process.kill()
        self.lost = (
            f"policy.gpus: {why}; the other ranks were ended. The arm holds. Reload the policy; if that fails, "
            "restart this process, and check nvidia-smi and dmesg"
        )
        logger.error("%s", self.lost)
        self._started.set()
        self._abort()

    def _abort(self) -> None:
        """End the collectives, once; wait for that, but not forever."""
        with self._aborting:
            joined, self._joined = self._joined, False
        if joined:
            ending = threading.Thread(target=self.abort, name="vla_ranks_abort", daemon=True)
            ending.start()
            ending.join(_ENDING)
            if ending.is_alive():
                logger.warning("policy.gpus: NCCL does not end on %s", self.device)


def _ending(process: subprocess.Popen[bytes]) -> str:
    with suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    status = process.returncode
    if status is None:
        return "closed its socket"
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


class FollowingRank(GroupOfRanks):
    """Another rank, in its own process; ``channel`` is the socket to rank 0."""

    def __init__(self, rank: int, count: int, device: torch.device, folder: Path, channel: socket.socket) -> None:
        self._channel = channel
        super().__init__(rank, count, device, folder)

    def orders(self) -> Iterator[str]:
        self._channel.send(b"ready")
        while order := self._channel.recv(MESSAGE):
            yield order.decode()


def describe(config: Config, options: NetworkOptions) -> dict[str, Any]:
    """Describe a policy to the other ranks: what :func:`restore_config` needs."""
    own = asdict(options)
    return {"options": own, "kind": type(options).__name__, "preset": config.preset} | {
        name: asdict(getattr(config, name)) for name in _SECTIONS
    }


def restore_config(message: dict[str, Any], options: type[NetworkOptions]) -> Config:
    """Return the options that :func:`describe` described."""
    sections = {name: type(getattr(Config(), name))(**_tuples(message[name])) for name in _SECTIONS}
    return Config(policy=options(**_tuples(message["options"])), preset=message["preset"], **sections)


_SECTIONS = ("camera", "features")
"""Sections besides ``policy`` that a model depends on."""


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
