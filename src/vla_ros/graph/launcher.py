"""Ends a process when its launcher has ended, for whatever reason.

`ros2 launch` leaves its processes running when it is ended by SIGTERM or SIGKILL. Linux's parent-death signal does
not help: it is sent when the *thread* that started the process ends, and gets lost if a wrapper process lies in
between.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import MutableMapping

VARIABLE = "VLA_ROS_LAUNCHER_PID"
"""Environment variable with the process id of the launcher."""

_PERIOD = 0.05  # s between checks where the kernel cannot report the end of a process


def launched() -> dict[str, str]:
    """Return the environment variable that makes a child process end with this one."""
    return {VARIABLE: str(os.getpid())}


def end_with_launcher(environment: MutableMapping[str, str] = os.environ) -> None:
    """Send this process SIGTERM once its launcher is gone; does nothing without a launcher.

    The variable is removed from ``environment``: the launcher of child processes is this process, or none.
    """
    named = environment.pop(VARIABLE, "")
    if named.isdecimal():
        threading.Thread(target=_watch, args=(int(named),), name="launcher", daemon=True).start()


def wait_for_end(pid: int, timeout: float | None = None) -> bool:
    """Wait until a process has ended, reaped or not; return False after ``timeout`` seconds."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):  # no Linux, or a sandbox that forbids the call
        return _poll_for_end(pid, timeout)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(None if timeout is None else 1000 * timeout))
    finally:
        os.close(descriptor)


def _poll_for_end(pid: int, timeout: float | None) -> bool:
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # it runs, as another user
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(_PERIOD)


def _watch(launcher: int) -> None:
    try:
        wait_for_end(launcher)
        with contextlib.suppress(OSError):  # the launcher may have read this process's output
            print(f"the launcher (process {launcher}) is gone: ending", file=sys.stderr, flush=True)
    finally:  # also if it cannot be watched: a node that nobody may end is worse than one that ends
        os.kill(os.getpid(), signal.SIGTERM)
