"""Nothing that a launch file of this package starts outlives the launch.

Processes look for their launcher themselves (:mod:`vla_ros.graph.launcher`), which holds for SIGKILL, too. SIGTERM
makes `launch` leave at once; where it is the first process of a container everything else would be killed with it,
before the node could send its hold. So it waits for its children on the way out.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
from collections.abc import Callable
from typing import TypeVar

from launch.actions import ExecuteLocal, Shutdown
from launch.event_handlers import OnShutdown
from launch.events.process import ProcessExited

from launch import Action, LaunchContext
from vla_ros.graph.launcher import wait_for_end

_PATIENCE = 8.0  # s; `docker stop` waits for 10
_Action = TypeVar("_Action", bound=ExecuteLocal)


def ends_with_launch(action: _Action) -> _Action:
    """Have ``action``'s process end in order, and wait for that, where `launch` leaves before it has ended."""
    atexit.register(_end, action)
    return action


def shut_down_with(name: str) -> Callable[[ProcessExited, LaunchContext], list[Action]]:
    """For ``on_exit``: ends the launch when the process called ``name`` does.

    `ros2 launch` returns 1 where the process failed by itself: where autostart failed, for one.
    """

    def on_exit(event: ProcessExited, context: LaunchContext) -> list[Action]:
        if event.returncode and not context.is_shutdown:
            raise RuntimeError(f"{name} ended with status {event.returncode}")  # launch's only way to fail
        return [Shutdown(reason=f"{name} ended")]

    return on_exit


def interrupted_at_shutdown(action: _Action, context: LaunchContext) -> _Action:
    """Send SIGINT to ``action``'s process as soon as the launch shuts down.

    Where somebody sends SIGINT to an interactive `launch`, it takes that for Ctrl-C, which its processes got as
    well, and does nothing for five seconds. Only for processes that take a second SIGINT calmly.
    """

    def on_shutdown(event: object, shut: LaunchContext) -> None:
        _interrupt(action)

    context.register_event_handler(OnShutdown(on_shutdown=on_shutdown))
    return action


def _interrupt(action: ExecuteLocal) -> int | None:
    """Send SIGINT where the process still runs; its id then."""
    details = action.process_details
    if details is None or action.return_code is not None:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.kill(details["pid"], signal.SIGINT)
    return int(details["pid"])


def _end(action: ExecuteLocal) -> None:
    pid = _interrupt(action)
    if pid is not None:
        wait_for_end(pid, _PATIENCE)
