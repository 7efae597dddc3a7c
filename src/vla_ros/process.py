"""Prepares this process: a Python with the required libraries, the C allocator, signals, priority, a clean end."""

import ctypes
import gc
import importlib.util
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of glibc's malloc.h
_KEPT = 256 << 20  # bytes
_LARGEST = 32 << 20  # bytes; the largest mmap threshold that some versions of glibc accept
_PRIORITY = 20  # of SCHED_FIFO
_TEXT, _TEXT_HEAD = 1 << 16, struct.Struct("<III")  # bytes; number, length and CRC-32 of a shared text
_LOCK_ALL = 3  # MCL_CURRENT | MCL_FUTURE of mman.h
_OOM, _OOM_ABOVE = "-1000", 1000  # oom_score_adj: never killed, and killed before another process
_NEEDED = ("numpy", "yaml", "rich", "PIL", "simplejpeg", "cv2")
_NATIVE = ("vla_control", "vla_inference", "vla_scene", "vla_collision", "vla_collision_view")
_KINEMATICS = ("pinocchio",)  # needed only with a URDF; its user raises MissingDependencyError


def use_environment(module: str) -> None:
    """Run ``module`` with the active virtual environment's Python if this Python lacks a library.

    The programs that ``colcon build --symlink-install`` installs run under colcon's Python, which may lack the
    libraries (Ubuntu's does).

    Raises:
        SystemExit: Libraries are missing and no virtual environment is active; the message names the libraries.
    """
    missing = [name for name in (*_NEEDED, *_KINEMATICS) if importlib.util.find_spec(name) is None]
    if not missing:
        return
    active = os.environ.get("VIRTUAL_ENV", "")
    python = Path(active) / "bin" / "python"
    if active and Path(sys.prefix).resolve() != Path(active).resolve() and python.exists():
        os.execv(python, [str(python), "-m", module, *sys.argv[1:]])
    if set(missing) <= set(_KINEMATICS):
        return
    sys.exit(
        f"vla_ros: {sys.executable} has no {', '.join(missing)}; activate the virtual environment that has them "
        "(such as: . ~/vla/bin/activate)"
    )


def end_process(status: int) -> int:
    """Return ``status``, or exit with it at once if a thread that was abandoned is still at work.

    If native code, such as torch's, returns to a thread while the interpreter shuts down, the process aborts.
    """
    if any(thread.name in _NATIVE for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def keep_freed_memory() -> None:
    """Keep freed memory in the process instead of returning it to the kernel; no effect without glibc.

    Camera images allocate and free megabytes thirty times a second. With glibc's defaults, each
    allocation causes page faults for the whole image: at 1080p, p99 is 26 ms instead of 9.5 ms, and a policy
    server's request of 1 ms takes 0.1 to 0.2 ms longer.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_TRIM_THRESHOLD, _KEPT)
    mallopt(_TOP_PAD, _LARGEST // 2)
    if not mallopt(_MMAP_THRESHOLD, _KEPT):
        mallopt(_MMAP_THRESHOLD, _LARGEST)


def take_priority() -> list[str]:
    """Ask the kernel to run this process first, and to keep it in memory; return what it does not permit."""
    refused = []
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    except OSError as error:
        refused.append(f"SCHED_FIFO: {error.strerror} (rtprio in /etc/security/limits.d)")
    try:
        Path("/proc/self/oom_score_adj").write_text(_OOM)
    except OSError as error:
        refused.append(f"oom_score_adj: {error.strerror}")
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("0")  # without what a parent has raised it by (give_way)
    return refused


def give_way(process: int) -> None:
    """Let the kernel end this process before another one where memory runs out; raising the score is permitted."""
    own, other = (Path(f"/proc/{each}/oom_score_adj") for each in ("self", process))
    with suppress(OSError):  # the other one has ended
        score = int(other.read_text()) + _OOM_ABOVE
        if int(own.read_text()) < score:
            own.write_text(f"{min(score, 1000)}")


def stay_in_memory() -> list[str]:
    """Lock this process's memory and freeze what the garbage collector need not look at; return what failed."""
    keep_prompt()
    if ctypes.CDLL(None, use_errno=True).mlockall(_LOCK_ALL):
        return [f"mlockall: {os.strerror(ctypes.get_errno())} (memlock in /etc/security/limits.d)"]
    return []


SWITCH_INTERVAL = 0.0005
"""Maximum time in seconds for which a thread that runs Python code keeps another one waiting."""


def keep_prompt() -> None:
    """Let no thread that runs Python code, and no collection of what is loaded, keep other threads for long.

    By default, the first lasts 5 ms, and the second 50 ms and more. Call ``gc.unfreeze()`` at the end: otherwise
    Triton's bindings report all their types as leaked.
    """
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.collect()
    gc.freeze()


class SharedText:
    """A text in memory that two processes share: one writes, the other reads the newest, and nobody waits.

    It needs no memory of the kernel, as a socket or a pipe does: of a cgroup that has none left, the kernel ends
    processes that need some, also while the memory of one that was ended is still being freed.

    Args:
        file: Descriptor of its file (``os.memfd_create``), which both processes have.
    """

    def __init__(self, file: int) -> None:
        os.ftruncate(file, _TEXT)
        self._memory, self._number = mmap.mmap(file, _TEXT), 0
        os.close(file)

    def write(self, text: str) -> None:
        """Replace the text; raises IndexError if it has over 64 KiB."""
        data, self._number = text.encode(), self._number + 1
        head = _TEXT_HEAD.pack(self._number, len(data), zlib.crc32(data, self._number))
        self._memory[: len(head) + len(data)] = head + data

    def read(self) -> str | None:
        """Return the text, or None if it was read before or is being written."""
        number, length, seal = _TEXT_HEAD.unpack_from(self._memory)
        data = self._memory[_TEXT_HEAD.size : _TEXT_HEAD.size + length]
        if number == self._number or zlib.crc32(data, number) != seal:
            return None
        self._number = number
        return data.decode()


class Printing:
    """Standard output and error of this process, through a pipe and a copier of its own.

    What does not fit into the pipe is lost. The copier is no thread, which could keep the interpreter, and ends
    when this process does.
    """

    def __init__(self) -> None:
        read, write = os.pipe()
        os.set_blocking(write, False)
        # A session of its own: Ctrl-C must not end it before the last line.
        self._copier = subprocess.Popen(["cat"], stdin=read, stdout=2, start_new_session=True)
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.close(read)
        os.close(write)

    @staticmethod
    def has_room() -> bool:
        """False while a line could get lost."""
        return bool(select.select([], [2], [], 0)[1])


REQUESTS: Mapping[signal.Signals, str] = {
    signal.SIGUSR1: "arm",
    signal.SIGUSR2: "disarm",
    signal.SIGHUP: "reset",
}


_asked: list[str] = []  # by signals since they were taken last


def record_requests() -> Mapping[signal.Signals, str]:
    """Only record the signals that are requests, from now on; return them. By default, each would end the process.

    In a terminal, SIGHUP is none: it says that the terminal was closed.
    """
    terminal = sys.stdin is not None and sys.stdin.isatty()
    requests = {number: what for number, what in REQUESTS.items() if not (terminal and number == signal.SIGHUP)}
    for number in requests:
        signal.signal(number, lambda number, _: _asked.append(REQUESTS[signal.Signals(number)]))
    return requests


def record_end() -> None:
    """Only record SIGTERM, from now on: what waits for a process that still starts must not be lost."""
    signal.signal(signal.SIGTERM, lambda *_: _asked.append("end"))


def take_requests() -> tuple[str, ...]:
    """Return what signals have asked for since the last call, as in :data:`REQUESTS`, or ``end``."""
    together = tuple(_asked)
    del _asked[: len(together)]
    return together
