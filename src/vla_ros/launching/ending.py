"""Ends the processes of a launch cleanly when the launch ends.

On SIGTERM `launch` exits at once, and if it is the first process of a container, the others are killed with it. The
launch therefore waits at exit until its processes have ended, so that the node can send its hold.
"""

import atexit
import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from typing import TypeVar

from launch.actions import ExecuteLocal, Shutdown
from launch.event_handlers import OnShutdown
from launch.events.process import ProcessExited

from launch import Action, LaunchContext
from vla_ros.graph.launcher import wait_for_end

_PATIENCE = 8.0  # s; `docker stop` waits for 10 s
_Action = TypeVar("_Action", bound=ExecuteLocal)


def interrupted_with_launch(*command: str) -> list[str]:
    """Return a command that runs ``command`` and sends it SIGINT when the launch ends.

    Use it for programs that do not watch their launcher. Linux sends the signal when the thread that started the
    process ends, here the thread that runs `launch`.
    """
    setpriv = shutil.which("setpriv")  # of util-linux
    return [*([setpriv, "--pdeathsig", "INT", "--"] if setpriv else []), *command]


def ends_with_launch(action: _Action) -> _Action:
    """At exit, interrupt the process of ``action`` if it still runs, and wait until it ends."""
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        # `launch` is only notified of signals with a Python handler (signal.set_wakeup_fd). By default SIGTERM
        # kills it silently, and Linux withholds the signal from the first process of a container.
        signal.signal(signal.SIGTERM, lambda *_: None)
    atexit.register(_end, action)
    return action


def shut_down_with(name: str) -> Callable[[ProcessExited, LaunchContext], list[Action]]:
    """Return an ``on_exit`` that ends the launch with the process ``name``; the status is 1 if that failed."""

    def on_exit(event: ProcessExited, context: LaunchContext) -> list[Action]:
        if event.returncode and not context.is_shutdown:
            raise RuntimeError(f"{name} ended with status {event.returncode}")  # launch's only way to fail
        return [Shutdown(reason=f"{name} ended")]

    return on_exit


def interrupted_at_shutdown(action: _Action, context: LaunchContext) -> _Action:
    """Interrupt the process of ``action`` when the launch shuts down.

    An interactive `launch` assumes that SIGINT is a Ctrl-C, which its processes receive as well, and does nothing
    for five seconds. Use this only for processes that tolerate a second SIGINT.
    """

    def on_shutdown(event: object, shut: LaunchContext) -> None:
        _interrupt(action)

    context.register_event_handler(OnShutdown(on_shutdown=on_shutdown))
    return action


def _interrupt(action: ExecuteLocal) -> int | None:
    """Send SIGINT if the process still runs; return its id, or None."""
    details = action.process_details
    if details is None or "pid" not in details or action.return_code is not None:
        return None  # it did not start, or has ended
    with contextlib.suppress(ProcessLookupError):
        os.kill(details["pid"], signal.SIGINT)
    return int(details["pid"])


def _end(action: ExecuteLocal) -> None:
    pid = _interrupt(action)
    if pid is not None:
        wait_for_end(pid, _PATIENCE)
