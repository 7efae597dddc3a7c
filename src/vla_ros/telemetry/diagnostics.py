"""Builds the node's ``/diagnostics``: one status per part, with standard levels.

Levels are those of ``diagnostic_msgs/DiagnosticStatus``. Names are ``<node>: <part>``, as ``diagnostic_updater``
writes them, so that ``diagnostic_aggregator`` groups them by its usual prefix rule.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vla_ros.collision.checker import Clearance
from vla_ros.control.mode import Mode
from vla_ros.control.safety import State, Status

OK, WARN, ERROR, STALE = 0, 1, 2, 3


@dataclass(frozen=True)
class PartStatus:
    """One status: the part's name, its level, a summary, and values by key."""

    name: str
    level: int
    message: str
    values: Mapping[str, str] = field(default_factory=dict)


def state_part(status: Status, counters: Mapping[str, int], instruction: str) -> PartStatus:
    level = {State.ARMED: OK, State.DISARMED: OK, State.HOLDING: WARN, State.STOPPED: ERROR}[status.state]
    message = status.state.value
    if status.stopped_by is not None:
        message += f": {status.stopped_by.value} ({status.detail or status.stopped_by.description})"
    elif status.holds and status.state is State.HOLDING:
        message += ": " + ", ".join(f"{reason.value} ({detail})" for reason, detail in status.holds.items())
    elif status.blocks:
        level = WARN
        message += "; cannot be armed: " + ", ".join(
            f"{why.value} ({detail})" for why, detail in status.blocks.items()
        )
    if status.mode is not Mode.AUTONOMOUS:
        message = f"{status.mode.value}, {message}"
    values = {
        "state": status.state.value,
        "mode": status.mode.value,
        "source": status.source,
        "instruction": instruction,
    }
    values |= {f"count/{name}": str(count) for name, count in sorted(counters.items())}
    return PartStatus("state", level, message, values)


def frames_part(frames: Mapping[str, Any]) -> PartStatus:
    dropped = frames["dropped"]
    values = {name: str(frames[name]) for name in ("received", "used", "commands")}
    values |= {f"dropped/{reason}": str(count) for reason, count in sorted(dropped.items())}
    if not frames["received"]:
        return PartStatus("camera", STALE, "no frame yet", values)
    message = f"{frames['used']} of {frames['received']} frames used"
    if not frames["unstamped"]:
        return PartStatus("camera", OK, message, values)
    values["unstamped"] = str(frames["unstamped"])
    return PartStatus(
        "camera", WARN, f"{message}; {frames['unstamped']} had no stamp, so their age is not known", values
    )


def policy_part(info: Mapping[str, Any], outside: int, view: str = "") -> PartStatus:
    """Report the numbers and strings of the last ``ActionChunk.info``.

    ``outside`` counts the tokens of the last second that were not action tokens (``outside_bins``); ``view`` is the
    SHA-256 of the viewpoint adapter, or empty.
    """
    values = {name: str(value) for name, value in info.items() if isinstance(value, (bool, int, float, str))}
    values |= {"view": view} if view else {}
    if outside:
        message = f"{outside} tokens were not action tokens and were clipped: check checkpoint, prompt and images"
        return PartStatus("policy", WARN, message, values)
    return PartStatus("policy", OK, "answers" if info else "reports no figures", values)


def latency_part(latency: Mapping[str, Mapping[str, float]]) -> PartStatus:
    """Report stage times of recent frames in milliseconds.

    ``frame_age`` is measured from the frame's stamp to its command, or to its action while the node is disarmed.
    """
    values = {}
    for stage, times in latency.items():
        values[f"{stage}/p50_ms"] = f"{times['p50']:.3f}"
        values[f"{stage}/p99_ms"] = f"{times['p99']:.3f}"
    age = latency.get("frame_age")
    message = f"frame age p50 {age['p50']:.1f} ms, p99 {age['p99']:.1f} ms" if age else "no action yet"
    return PartStatus("latency", OK, message, values)


def execution_part(execution: Mapping[str, float]) -> PartStatus:
    """Report how steadily the plan is executed (:meth:`ExecutionStats.summary`)."""
    values = {name: f"{value:g}" for name, value in execution.items()}
    if "stalled_share" not in execution:
        return PartStatus("execution", OK, "no motion yet", values)
    message = f"stalled for {execution['stalled_share']:.1%} of {execution['seconds']:.0f} s"
    if "seam_ratio" in execution:
        message += f", acceleration at seams {execution['seam_ratio']:.2g} times that within chunks"
    return PartStatus("execution", OK, message, values)


def collision_part(why_not: str, nearest: Clearance | None) -> PartStatus:
    """Report the nearest two bodies, or why nothing is checked."""
    if nearest is None:
        return PartStatus("collision", OK, f"not checked: {why_not}", {})
    pair = " and ".join(nearest.bodies)
    values = {"distance_m": f"{nearest.distance:.4f}", "bodies": pair}
    return PartStatus("collision", OK, f"{1e3 * nearest.distance:.0f} mm between {pair}", values)


def guard_part(guard: Mapping[str, Any]) -> PartStatus:
    """Report the state of the guard's process, or that there is none (``guard.process``)."""
    if not guard:
        return PartStatus("guard", OK, "none: this node sends its commands by itself", {})
    values = {name: str(value) for name, value in guard.items() if name != "counts"}
    values |= {f"count/{name}": str(count) for name, count in sorted(guard["counts"].items())}
    level = {"moving": OK, "holding": OK, "starting": WARN}.get(guard["state"], ERROR)
    return PartStatus("guard", level, f"{guard['state']}, {guard['age_ms']:.0f} ms ago", values)


def topics_part(findings: Mapping[str, str]) -> PartStatus:
    return PartStatus("topics", WARN if findings else OK, "; ".join(findings) or "nothing is wrong", findings)


def graph_part(lost_checks: str) -> PartStatus:
    return PartStatus("graph", WARN if lost_checks else OK, lost_checks or "all checks are in force")


def process_part(resources: Mapping[str, int]) -> PartStatus:
    values = {name: str(value) for name, value in resources.items()}
    resident = resources.get("resident_bytes")
    return PartStatus("process", OK, f"{resident / 2**20:.0f} MiB resident" if resident else "not known", values)


def diagnostic_array(parts: Sequence[PartStatus], node: str, stamp: int, make: Callable[[str], Any]) -> Any:
    """Build a ``diagnostic_msgs/DiagnosticArray``; ``stamp`` in nanoseconds; ``make`` returns a message class."""
    seconds, nanoseconds = divmod(stamp, 1_000_000_000)
    time = make("builtin_interfaces/msg/Time")(sec=seconds, nanosec=nanoseconds)
    header = make("std_msgs/msg/Header")(stamp=time, frame_id="")
    status, pair = make("diagnostic_msgs/msg/DiagnosticStatus"), make("diagnostic_msgs/msg/KeyValue")
    statuses = [
        status(
            level=bytes([part.level]),
            name=f"{node.lstrip('/')}: {part.name}",
            message=part.message,
            hardware_id=node.lstrip("/"),
            values=[pair(key=key, value=value) for key, value in part.values.items()],
        )
        for part in parts
    ]
    return make("diagnostic_msgs/msg/DiagnosticArray")(header=header, status=statuses)
