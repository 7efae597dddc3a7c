"""Raises an exception in one thread of this process, at a line that was chosen at random.

Python imports this module at the start of every process that has this folder in PYTHONPATH. The variable
``VLA_ROS_FAULT_THREAD`` has, separated by ``|``: a part of the command line of the process, the thread's name, how
many lines of the package that thread executes before, the file whose existence starts the count, and the file that
gets the time and the place.
"""

import json
import linecache
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

_OURS = f"{os.sep}vla_ros{os.sep}"


class InjectedError(RuntimeError):
    """What the thread fails with."""


def install(thread: str, lines: int, start: str, found: str) -> None:
    """Let the thread raise :class:`InjectedError` once ``start`` exists and it has executed so many lines."""
    left, begun = lines, False

    def watch() -> None:
        nonlocal begun
        while not Path(start).exists():
            time.sleep(0.01)
        begun = True

    def each_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if left > 0 and event == "line":
            # Nothing can fail at a `try:`, which does nothing, or where Python comes to the line of a `with` again
            # when it ends: an exception there would leave a lock taken for ever.
            code = frame.f_code
            text = linecache.getline(code.co_filename, frame.f_lineno).lstrip()
            if left > 1 or not text.startswith(("with ", "try:")):
                left -= 1
            if left == 0:
                sys.settrace(None)
                where = f"{code.co_filename.rpartition(_OURS)[2]}:{frame.f_lineno} ({code.co_name})"
                with Path(found).open("w") as file:
                    json.dump({"time": time.monotonic(), "place": where}, file)
                raise InjectedError(f"Injected at {where}")
        return each_line

    def each_call(frame: FrameType, event: str, argument: Any) -> Any:
        if not begun:
            return None
        if threading.current_thread().name != thread:
            sys.settrace(None)
            return None
        if left == lines:  # also what is being executed already
            caller = frame.f_back
            while caller is not None:
                if _OURS in caller.f_code.co_filename:
                    caller.f_trace = each_line
                caller = caller.f_back
        return each_line if _OURS in frame.f_code.co_filename and left > 0 else None

    def each_thread(frame: FrameType, event: str, argument: Any) -> Any:
        """Trace only the thread that is meant; the name is known once it runs."""
        if threading.current_thread().name not in (thread, "MainThread"):
            sys.settrace(None)
            return None
        sys.settrace(each_call)
        return each_call(frame, event, argument)

    watcher = threading.Thread(target=watch, name="fault", daemon=True)
    watcher.start()
    threading.settrace(each_thread)
    if thread == "MainThread":
        sys.settrace(each_call)


_WORDS = os.environ.get("VLA_ROS_FAULT_THREAD", "").split("|")
if len(_WORDS) == 5 and _WORDS[0] in " ".join(sys.orig_argv):
    install(_WORDS[1], int(_WORDS[2]), _WORDS[3], _WORDS[4])
