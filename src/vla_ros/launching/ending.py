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
from typing import TypeVar

from launch.actions import ExecuteLocal

from vla_ros.graph.launcher import wait_for_end

_PATIENCE = 8.0  # s; `docker stop` waits for 10
_Action = TypeVar("_Action", bound=ExecuteLocal)


def ends_with_launch(action: _Action) -> _Action:
    """Have ``action``'s process end in order, and wait for that, where `launch` leaves before it has ended."""
    atexit.register(_end, action)
    return action


def _end(action: ExecuteLocal) -> None:
    details = action.process_details
    if details is None or action.return_code is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(details["pid"], signal.SIGINT)
    wait_for_end(details["pid"], _PATIENCE)
