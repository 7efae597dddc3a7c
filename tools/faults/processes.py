"""Runs the node and the robot as processes, and isolates their DDS traffic."""

import contextlib
import fcntl
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from tools import forks
from tools.faults.records import Record
from vla_ros.errors import VlaRosError
from vla_ros.graph.launcher import wait_for_end

DOMAINS = range(150, 201)
_CYCLONE = "<CycloneDDS><Domain><Discovery><Tag>{}</Tag>{}</Discovery></Domain></CycloneDDS>"
_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP = _CGROUPS / "freezer"
_FIRST = "memory.usage_in_bytes", "memory.limit_in_bytes"  # version 1
_OURS = ("ROS_", "CYCLONEDDS_", "FASTRTPS_", "FASTDDS_")
_OF_ROS = ("ROS_DISTRO", "ROS_VERSION", "ROS_PYTHON_VERSION")
_FREEZER = {"FREEZE": "FROZEN", "THAW": "THAWED"}
_LEASE = "<LeaseDuration>{} s</LeaseDuration>"

forks.preload("tools.faults.node", "tools.faults.driver", "tools.faults.server")


def environment(domain: int, lease: float = 0.0) -> dict[str, str]:
    """Return an environment in which processes discover only each other, whatever the shell sets.

    No real robot may receive the commands: they stay on this host, and Cyclone's domain tag excludes all other
    participants. Fast DDS has no tag; there, only the domain is our own. ``lease`` is the time in seconds after
    which Cyclone DDS considers a silent process dead; 0 means its default of 10.
    """
    kept = {name: value for name, value in os.environ.items() if name in _OF_ROS or not name.startswith(_OURS)}
    kept |= {"ROS_DOMAIN_ID": str(domain), "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST", "OMP_NUM_THREADS": "1"}
    tag = f"vla_ros_faults_{os.getpid()}_{domain}"
    kept["CYCLONEDDS_URI"] = _CYCLONE.format(tag, _LEASE.format(lease) if lease else "")
    return kept


def freezer() -> Path | None:
    """Return the folder of the cgroup freezer (version 1) if this user may use it."""
    return _CGROUP if os.access(_CGROUP, os.W_OK) else None


def freeze(process: int, state: str) -> None:
    """Freeze a process with the cgroup freezer, or thaw it: unlike SIGSTOP, it cannot notice this."""
    group = _CGROUP / f"vla_ros_faults_{process}"
    group.mkdir(exist_ok=True)
    (group / "cgroup.procs").write_text(str(process))
    (group / "freezer.state").write_text(state)
    if not wait_until(lambda: (group / "freezer.state").read_text().strip() == state, 10.0):
        raise VlaRosError(f"process {process} was not {state.lower()} within 10 s")
    if state == "THAWED":
        (_CGROUP / "cgroup.procs").write_text(str(process))
        group.rmdir()


class MemoryGroup:
    """A cgroup of the processes that start in :meth:`entered`, also by a fork of the server that does so.

    Raises VlaRosError if this user may make none.

    Attributes:
        folder: Its folder.
    """

    def __init__(self, name: str) -> None:
        if not self.is_permitted():
            raise VlaRosError(f"{_CGROUPS} has no memory controller in which this user may make groups")
        self._second = "memory" in _controllers()
        self._above = _CGROUPS if self._second else _CGROUPS / "memory"
        self.folder = self._above / f"vla_ros_faults_{name}"
        self.folder.mkdir()

    @staticmethod
    def is_permitted() -> bool:
        first = _CGROUPS / "memory"
        return os.access(_CGROUPS if "memory" in _controllers() else first, os.W_OK)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        name = "" if self._second else "memory"
        own = next(path for _, controllers, path in lines if controllers == name)
        forkserver.ensure_running()
        starters = os.getpid(), forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        try:
            for one in starters:
                (self.folder / "cgroup.procs").write_text(str(one))
            yield
        finally:
            for one in starters:
                (self._above / own.lstrip("/") / "cgroup.procs").write_text(str(one))

    def limit(self, more: int) -> None:
        """Let its processes take ``more`` bytes than they have, all together; raises VlaRosError without any."""
        if not (self.folder / "cgroup.procs").read_text():
            raise VlaRosError(f"{self.folder} has no process")
        use, limit = ("memory.current", "memory.max") if self._second else _FIRST
        (self.folder / limit).write_text(str(int((self.folder / use).read_text()) + more))

    def close(self, seconds: float) -> int:
        """Remove the group once its processes have ended; return how many the kernel has killed for memory."""
        wait_until(lambda: not (self.folder / "cgroup.procs").read_text(), seconds)
        text = (self.folder / ("memory.events" if self._second else "memory.oom_control")).read_text()
        self.folder.rmdir()
        return int(text.split("oom_kill ")[1].split()[0])


def _controllers() -> str:
    """Return the controllers of groups (version 2), or ""."""
    file = _CGROUPS / "cgroup.subtree_control"
    return file.read_text() if file.exists() else ""


def _is_stopped(process: int) -> bool:
    """Return True if every thread is stopped or the process has ended."""
    tasks = Path(f"/proc/{process}/task")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return all(
            (task / "stat").read_text(encoding="latin-1").rpartition(")")[2].split()[0] in "TtZX"
            for task in tasks.iterdir()
        )
    return True


def starved(process: int) -> float:
    """Return for how many seconds the threads of a process were ready to run, and waited for a processor.

    The kernel counts this (``schedstat``); 0 if it does not, or if the process has ended.
    """
    total = 0
    for file in Path(f"/proc/{process}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            total += int(file.read_text().split()[1])
    return total / 1e9


@contextlib.contextmanager
def reserved(domains: SimpleQueue[int]) -> Iterator[int]:
    """Take a domain that no other run on this host uses, and put it back afterwards."""
    while True:
        domain = domains.get()
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                claim.bind(f"\0vla_ros_faults_domain_{domain}")
            except OSError:
                domains.put(domain)
                continue
            try:
                yield domain
            finally:
                domains.put(domain)
            return


class Process:
    """A Python module that runs as a separate process; without ``output``, pipes are its standard files."""

    def __init__(self, words: Sequence[str], domain: int, lease: float, output: int | None = None) -> None:
        self.process = forks.Fork(forks.module, words, output, output or 2, environment(domain, lease))

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, name: str) -> None:
        """Send a signal; ``DISK_FULL``: prevent its files from growing; ``FREEZE``, ``THAW``: :func:`freeze`.

        Returns once no thread of a suspended process runs.
        """
        if name in _FREEZER:
            freeze(self.process.pid, _FREEZER[name])
        elif name == "DISK_FULL" and self.alive:
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        elif self.alive:
            self.process.send_signal(getattr(signal, name))
        if name == "SIGKILL":
            self.process.wait(10)
        if name == "SIGSTOP" and not wait_until(lambda: _is_stopped(self.process.pid), 10.0):
            raise VlaRosError(f"process {self.process.pid} was not suspended within 10 s")

    def end(self, name: str = "SIGINT", patience: float = 20.0) -> int:
        self.signal("SIGCONT")
        self.signal(name)
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(10)


class Pipe:
    """A pipe whose content is appended to a file, as by a log's reader, until that reader stalls."""

    def __init__(self, file: Path) -> None:
        self._out, self.end = os.pipe()
        fcntl.fcntl(self.end, fcntl.F_SETPIPE_SZ, 4096)
        self._flows, self._waits = threading.Event(), threading.Event()
        self._flows.set()
        self._thread = threading.Thread(target=self._read, args=(file.open("ab", buffering=0),), daemon=True)
        self._thread.start()

    def stall(self, stalls: bool) -> None:
        """Stop reading and fill the pipe, so that whoever writes is blocked, or read on."""
        if not stalls:
            self._flows.set()
            return
        self._flows.clear()
        filling = os.open(f"/proc/self/fd/{self.end}", os.O_WRONLY | os.O_NONBLOCK)
        os.write(filling, b"\n")  # the reader takes it, and then nothing more
        self._waits.wait(10)
        for size in (1024, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(filling, b"\n" * size)
        os.close(filling)

    def close(self) -> None:
        if self.end >= 0:
            os.close(self.end)
            self.end = -1
            self._thread.join(10)

    def _read(self, log: IO[bytes]) -> None:
        with log:
            while text := os.read(self._out, 65536):
                log.write(text)
                if not self._flows.is_set():
                    self._waits.set()
                    self._flows.wait()
                    self._waits.clear()
        os.close(self._out)


class NodeProcess(Process):
    """The node under test; appends its output to ``log``, and passes ``options`` with ``-p``."""

    module = "tools.faults.node"

    def __init__(
        self, domain: int, log: Path, options: Mapping[str, str], words: Sequence[str] = (), lease: float = 0.0
    ) -> None:
        self.log = log
        self._file = log.with_name("pid")  # written by the launcher
        self._pipe = Pipe(log)
        self._file.unlink(missing_ok=True)
        first = [str(self._file)] if self.module != NodeProcess.module else []
        given = [word for name, value in options.items() for word in ("-p", f"{name}:={value}")]
        command = [self.module, *first, *given, *words]
        super().__init__(command, domain, lease, self._pipe.end)

    def signal(self, name: str) -> None:
        """Send a signal, or let the log stall (``LOG_STALLS``) and flow again (``LOG_FLOWS``).

        ``RECORDER_KILLED`` kills the node's recorder, ``RECORDER_DISK_FULL`` prevents its files from growing,
        ``BAGS_REMOVED`` removes its bags.
        """
        if name.startswith("LOG_"):
            self._pipe.stall(name == "LOG_STALLS")
        elif name == "BAGS_REMOVED":
            for bag in {file.parent for file in self.log.parent.glob("*/*.mcap")}:
                shutil.rmtree(bag)
        elif name.startswith("RECORDER_"):
            for child in _recorders(self.process.pid):
                if name == "RECORDER_KILLED":
                    os.kill(child, signal.SIGKILL)
                else:
                    resource.prlimit(child, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        else:
            super().signal(name)

    @property
    def starved(self) -> float:
        """Seconds for which the node's threads have waited for a processor (:func:`starved`)."""
        return starved(self.process.pid)

    def end(self, name: str = "SIGINT", patience: float = 20.0) -> int:
        self._pipe.stall(False)
        try:
            return super().end(name, patience)
        finally:
            self._pipe.close()


def _recorders(process: int) -> list[int]:
    """Return the recorders of a node; a guard is its child, too."""
    files = Path(f"/proc/{process}/task").glob("*/children")
    children = [int(child) for file in files for child in file.read_text().split()]
    return [child for child in children if b"\0record\0" in Path(f"/proc/{child}/cmdline").read_bytes()]


class LaunchedNode(NodeProcess):
    """The node under test, started by a launcher.

    The launcher gets SIGTERM and SIGKILL; the node gets the other signals.
    """

    module = "tools.faults.launcher"

    @property
    def alive(self) -> bool:
        return super().alive or not wait_for_end(self._node, 0.0)

    def signal(self, name: str) -> None:
        """Send a signal to the launcher or to the node."""
        if name in ("SIGTERM", "SIGKILL"):
            self.process.send_signal(getattr(signal, name))
            self.process.wait(10)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._node, getattr(signal, name))

    @property
    def starved(self) -> float:
        return starved(self._node)

    @property
    def _node(self) -> int:
        if not wait_until(lambda: self._file.exists() and bool(self._file.read_text()), 20.0):
            raise VlaRosError("start: the launcher started no node")
        return int(self._file.read_text())


class ServerProcess(Process):
    """The policy server; ``words`` are arguments of :mod:`tools.faults.server` at every start."""

    def __init__(self, domain: int, words: Sequence[str] = ()) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self._domain, self._words = domain, words
        self._start(())

    def do(self, what: str) -> None:
        """Send a signal, restart the server (``start`` with arguments), or set its fault."""
        if what.startswith("SIG"):
            self.signal(what)
        elif what.startswith("start"):
            self.end("SIGKILL")
            self._start(what.split()[1:])
        else:
            assert self.process.stdin is not None
            self.process.stdin.write(what + "\n")
            self._heard("done")

    def end(self, name: str = "SIGINT", patience: float = 20.0) -> int:
        try:
            return super().end(name, patience)
        finally:
            for pipe in (self.process.stdin, self.process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    if pipe is not None:
                        pipe.close()

    def _start(self, words: Sequence[str]) -> None:
        super().__init__(["tools.faults.server", str(self.port), *self._words, *words], self._domain, 0.0)
        self._heard("ready")

    def _heard(self, expected: str) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if line != expected:
            raise VlaRosError(f"the policy server wrote {line!r}, expected {expected!r}")


class RobotProcess(Process):
    """The robot; ``take`` is called with each of its records, on a thread that this class starts."""

    def __init__(
        self, domain: int, words: Sequence[str], take: Callable[[Record], None], lease: float = 0.0
    ) -> None:
        super().__init__(["tools.faults.driver", *words], domain, lease)
        self._take = take
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def order(self, **words: Any) -> None:
        """Send an order; the robot records when it follows the order."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(words) + "\n")
        except (BrokenPipeError, ValueError) as error:
            raise VlaRosError(f"the robot's process has ended ({error})") from None

    def close(self) -> None:
        if self.alive:
            self.signal("SIGCONT")
            with contextlib.suppress(VlaRosError):  # the process has ended in the meantime
                self.order(do="end")
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        self._reader.join(10)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    def _read(self) -> None:
        lines: IO[str] | None = self.process.stdout
        assert lines is not None
        for line in lines:
            with contextlib.suppress(ValueError):  # an incomplete line of a killed process
                self._take(Record.parse(line))


def wait_until(ready: Callable[[], bool], seconds: float, period: float = 0.005) -> bool:
    """Poll ``ready()`` every ``period`` seconds; return whether it became True within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(period)
    return True
