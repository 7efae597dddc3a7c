"""The fault table: what is injected, and what must follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tools.faults.hand import NAME

Order = Mapping[str, Any]


class Reaction(str, Enum):
    """What the node must do.

    ``GOES_ON``: motions continue (if reasons are named, after a moment). ``HOLDS``: motions end, and resume by
    themselves after the fault. ``STOPS``: they end, and resume only after a person has reset and armed.
    ``DISARMED``: they end until a person arms. ``ENDS``: the process ends, and its successor moves nothing until a
    person has armed it.
    """

    GOES_ON = "goes on"
    HOLDS = "holds"
    STOPS = "stops"
    DISARMED = "disarmed"
    ENDS = "ends"


@dataclass(frozen=True)
class Row:
    """One fault."""

    name: str  # unique, for people
    reaction: Reaction  # what must follow
    reasons: tuple[str, ...] = ()  # one of these must be named on ``~/status``; any reason if empty
    begin: tuple[Order, ...] = ()  # orders to the robot at the injection
    end: tuple[Order, ...] = ()  # orders that end the fault
    within: float = 0.0  # seconds after which no motion may arrive (timeouts included), if it holds or stops
    lasts: tuple[float, float] = (0.3, 0.6)  # minimum and maximum duration of the fault in seconds
    # Signals to the node's process at the injection and after it, by name; ``DISK_FULL`` stops its files from
    # growing.
    node: tuple[str, ...] = ()
    # Signals to the robot's process in the same way. A killed one has a successor afterwards.
    robot: tuple[str, ...] = ()
    # The policy is asked over a websocket; what happens to its server at the injection and after it: a signal,
    # ``start`` with arguments (again), or a fault of :mod:`tools.faults.server`.
    server: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)  # options of the node, besides :data:`OPTIONS`
    robot_words: tuple[str, ...] = ()  # further arguments of the robot
    arms: tuple[str, ...] = ()  # names of its arms where there are several; orders name one of them but the first
    horizon: int = 1  # steps per chunk of the policy
    seconds: float = 0.0  # duration of each inference
    simulated: bool = False  # with simulated time
    lag: float = 0.0  # seconds by which the fault delays the robot's process
    memory: float = 0.0  # seconds during which the fault keeps the node from measuring
    pieces: bool = False  # the fault removes joints from joint states
    fresh: bool = False  # each injection needs a newly started node
    launched: bool = False  # the node is started by a launcher, which gets the signals SIGTERM and SIGKILL
    traced: bool = False  # the node records the outcome of each frame (``node.trace``)
    lease: float = 0.0  # seconds after which DDS considers a silent process dead (Cyclone's default is 10)
    renews: bool = False  # the fault changes the task: after ``within``, nothing begun before may move the arm
    # What the robot lacks when the node starts, is armed and waits for it; the fault is that alone.
    absent: str = ""


OPTIONS: Mapping[str, str] = {
    "node.backend": "dds",  # rclpy on another middleware would not know the tag that keeps the robot's words here
    "robot.urdf": "demo",
    "robot.tip_frame": "tool",
    "robot.gripper_joint_names": "[finger_left, finger_right]",
    "policy.instruction": "wave",
    "camera.width": "64",
    "camera.height": "48",
    "control.rate_hz": "0.0",
    "limits.max_translation_step": "0.03",
    "limits.max_rotation_step": "0.15",
    "limits.max_joint_step": "0.15",
    "limits.joint_margin": "0.02",
    "limits.velocity_scale": "0.8",
    "limits.workspace_low": "[0.25, -0.42, 0.05]",
    "limits.workspace_high": "[0.80, 0.42, 0.60]",
    "timeouts.camera": "0.3",
    "timeouts.joint_state": "0.3",
    "timeouts.joint_state_age": "0.3",
    "timeouts.inference": "0.3",
    "timeouts.frame_age": "0.4",
    "timeouts.driver": "0.3",
    "timeouts.clock_jump": "0.5",
    "timeouts.frozen_frames": "6",
}
"""Options of every row: short timeouts, so that fifty injections take a minute."""

_SUPERVISION = 0.1  # s; for a watchdog that looks every 20 ms on a machine with other work
_SILENT = 0.3 + _SUPERVISION
_NOTICED = 0.35  # s; half a second with the grace that every row has
_NO_FRAMES, _NO_JOINTS = {"do": "frames"}, {"do": "joints"}
_WAVE = {"do": "instruct", "text": "wave"}


def _frames(kind: str, amount: float = 1.0) -> tuple[Order, ...]:
    return ({"do": "frames", "kind": kind, "amount": amount},)


def _joints(kind: str, amount: float = 1.0) -> tuple[Order, ...]:
    return ({"do": "joints", "kind": kind, "amount": amount},)


def _camera(name: str, reaction: Reaction, kind: str, amount: float = 1.0, *reasons: str, **more: Any) -> Row:
    if reaction is Reaction.HOLDS:
        more.setdefault("within", _SILENT)
        more.setdefault("lasts", (0.6, 0.9))
    return Row(f"camera {name}", reaction, reasons, _frames(kind, amount), (_NO_FRAMES,), **more)


def _state(name: str, reaction: Reaction, kind: str, amount: float = 1.0, *reasons: str, **more: Any) -> Row:
    if reaction is Reaction.HOLDS:
        more.setdefault("within", _SILENT)
        more.setdefault("lasts", (0.6, 0.9))
    return Row(f"joint states {name}", reaction, reasons, _joints(kind, amount), (_NO_JOINTS,), **more)


def _content(kind: str) -> Row:
    # What other publishers say of a joint that is not named would do, for as long as it is fresh.
    unnamed = kind in ("missing", "renamed", "none")
    return Row(
        f"joint states {kind}",
        Reaction.HOLDS,
        ("joint_state_invalid", "joint_state_stale") if unnamed else ("joint_state_invalid",),
        ({"do": "content", "kind": kind},),
        ({"do": "content", "kind": ""},),
        within=_SILENT if unnamed else _SUPERVISION,
        lasts=(0.6, 0.9) if unnamed else (0.3, 0.6),
        pieces=unnamed,
    )


def _policy(name: str, text: str, reason: str, within: float = _SUPERVISION, **more: Any) -> Row:
    return Row(
        f"policy {name}",
        Reaction.HOLDS,
        (reason,),
        ({"do": "instruct", "text": text},),
        (_WAVE,),
        within=within,
        lasts=(0.5, 0.8),
        **more,
    )


_GOES_ON, _HOLDS, _STOPS = Reaction.GOES_ON, Reaction.HOLDS, Reaction.STOPS
_DISARMED, _ENDS = Reaction.DISARMED, Reaction.ENDS

_TOPICS = (("command", "arm/joint_command"), ("joint_states", "joint_states"))
_STOP: tuple[Order, ...] = ({"do": "stop"},)
_SERVO: Mapping[str, Any] = {
    "options": {"control.output": "twist_stamped", "robot.gripper_joint_names": "[]", "control.rate_hz": "10.0"}
    | {"gripper.mode": "none", "timeouts.inference": "1.5"},
    "robot_words": ("--listens", "twist"),
}
_VELOCITY: Mapping[str, Any] = {
    "options": {
        **_SERVO["options"],
        "control.output": "joint_velocity_state",
        "features.action": '["arm.joint_velocity[1]"]',
    },
    "robot_words": ("--listens", "velocity"),
}
_AHEAD: Mapping[str, Any] = {
    "options": {
        "control.rate_hz": "20.0",
        "control.schedule": "blend",
        "limits.max_joint_acceleration": "12.0",
    },
    "horizon": 8,
    "seconds": 0.15,
}
_FINE: Mapping[str, Any] = {**_AHEAD, "options": {**_AHEAD["options"], "control.command_rate_hz": "250.0"}}
_EASED = 0.3 + _SUPERVISION  # s; an answer under way, and coming to rest
_ARMS: Mapping[str, Any] = {
    "options": {
        "robot.arms": "[left, right]",
        "features.action": "[left.tip_delta, left.gripper, right.joint_position, right.gripper]",
    }
    | {f"{arm}.{leaf}": f"/{arm}/{topic}" for arm in ("left", "right") for leaf, topic in _TOPICS},
    "arms": ("left", "right"),
}
_APART: Mapping[str, Any] = {
    "options": {"topics.gripper": "/gripper/command", "gripper.output": "joint_state"},
    "robot_words": ("--listens", "apart"),
}

_ACTION: Mapping[str, Any] = {
    "options": {"topics.gripper": NAME, "gripper.output": "gripper_command", "timeouts.gripper": "0.3"},
    "robot_words": ("--listens", "action"),
}


def _hand(name: str, answer: str) -> Row:
    """Return a gripper's action that does something else with a goal; the arm goes on."""
    begin, end = ({"do": "hand", "answer": each} for each in (answer, "done"))
    lasts = (2.4, 2.7)  # a second since the goal before, timeouts.gripper, and a second to the next status
    return Row(
        f"gripper action {name}", Reaction.GOES_ON, ("gripper_failed",), (begin,), (end,), lasts=lasts, **_ACTION
    )


_UNREADABLE = ("inference_error", "server_lost")


def _server(
    name: str,
    *what: str,
    reasons: tuple[str, ...] = ("server_lost",),
    ahead: bool = False,
    **options: str,
) -> Row:
    more = dict(_AHEAD) if ahead else {"options": {}}
    more["options"] = more["options"] | {f"policy.{key}": value for key, value in options.items()}
    more["options"] |= {"policy.name": "remote"}
    return Row(
        f"server {name}",
        Reaction.HOLDS,
        reasons,
        within=0.5 * ahead + _SUPERVISION,
        lasts=(0.6, 0.9),
        server=what if len(what) > 1 else (*what, ""),
        **more,
    )


def _contested(what: str, reaction: Reaction, reason: str, **more: Any) -> Row:
    """Return a row in which a second node does what only one may do."""
    return Row(
        f"{what} contested",
        reaction,
        (reason,),
        ({"do": "intrude", "what": what},),
        ({"do": "withdraw"},),
        within=_NOTICED,
        lasts=(0.8, 1.2),
        **more,
    )


ROWS: tuple[Row, ...] = (
    _camera("silent", _HOLDS, "drop", 1.0, "camera_stale"),
    _camera("loses half", _GOES_ON, "drop", 0.5),
    _camera("late 0.2 s", _GOES_ON, "delay", 0.2),
    _camera("late 0.6 s", _HOLDS, "delay", 0.6, "frame_old", "camera_stale", lasts=(1.0, 1.3)),
    _camera("jitter", _GOES_ON, "jitter", 0.1),
    _camera("duplicated", _GOES_ON, "duplicate", 2),
    _camera("reordered", _GOES_ON, "reorder", 4),
    _camera("in bursts", _GOES_ON, "burst", 6),
    # Six frames that came: on a machine that has no time for the node, that is longer than six periods.
    _camera("frozen pixels", _HOLDS, "freeze", 1.0, "camera_frozen", within=1.2, lasts=(1.5, 1.8)),
    _camera("repeats a message", _HOLDS, "repeat", 1.0, "camera_stale"),
    _camera("stamps 5 s old", _HOLDS, "shift", -5.0, "frame_old", within=_SUPERVISION),
    _camera("stamps 5 s ahead", _HOLDS, "shift", 5.0, "frame_from_future", within=_SUPERVISION),
    _camera("bits flip", _GOES_ON, "corrupt", 3),
    _camera("pixels missing", _HOLDS, "short", 1.0, "image_invalid", within=_SUPERVISION),
    _camera("garbage", _HOLDS, "garbage", 1.0, "image_invalid", within=_SUPERVISION),
    _camera("wrong encoding", _HOLDS, "encoding", 1.0, "image_invalid", within=_SUPERVISION),
    _camera("impossible size", _HOLDS, "huge", 1.0, "image_invalid", within=_SUPERVISION),
    _camera("no pixels", _HOLDS, "empty", 1.0, "image_invalid", within=_SUPERVISION),
    Row(
        "camera disconnects",
        _HOLDS,
        ("camera_stale",),
        ({"do": "leave", "what": "/camera/image_raw"},),
        ({"do": "join", "what": "/camera/image_raw"},),
        within=_SILENT,
        lasts=(0.6, 0.9),
    ),
    _state("silent", _HOLDS, "drop", 1.0, "joint_state_stale"),
    _state("late 0.15 s", _GOES_ON, "delay", 0.15),
    _state("late 0.6 s", _HOLDS, "delay", 0.6, "joint_state_stale", lasts=(1.0, 1.3)),
    _state("frozen", _HOLDS, "repeat", 1.0, "joint_state_stale"),
    _state("reordered", _GOES_ON, "reorder", 4),
    _state("bits flip", _GOES_ON, "corrupt", 2, pieces=True),
    *(_content(kind) for kind in ("nan", "infinite", "missing", "short", "outside", "renamed", "none")),
    _policy("late", "late 0.5", "inference_late", within=0.3 + _SUPERVISION),
    _policy("raises", "raise", "inference_error"),
    _policy("answers NaN", "nan", "action_invalid"),
    _policy("answers infinity", "infinite", "action_invalid"),
    _policy("answers 5 numbers", "shape", "action_invalid"),
    _policy("answers nothing", "empty", "action_invalid"),
    _server("killed", "SIGKILL", "start"),
    _server("suspended", "SIGSTOP", "SIGCONT", reasons=("server_lost", "inference_late")),
    _server("has another policy", "start --horizon 3", "start"),
    _server("has another key", "start --api-key of-somebody-else", "start"),
    _server("cuts connections", "cut"),
    _server("loses answers", "lose", reasons=("server_lost", "inference_late")),
    _server("delays answers", "delay", reasons=("server_lost", "inference_late")),
    _server("mixes answers up", "mix", reasons=_UNREADABLE),
    _server("truncates answers", "truncate", reasons=_UNREADABLE),
    _server("sends megabytes", "oversize", reasons=_UNREADABLE, max_answer="1"),
    _server("answers with errors", "error", reasons=("inference_error",)),
    _server("killed, ahead", "SIGKILL", "start", ahead=True),
    _server("loses answers, ahead", "lose", reasons=("server_lost", "inference_late"), ahead=True),
    _server("mixes answers up, ahead", "mix", reasons=_UNREADABLE, ahead=True),
    _server("delays answers, ahead", "delay", reasons=("server_lost", "inference_late"), ahead=True),
    Row("operator stops", _STOPS, ("operator_stop",), ({"do": "stop"},), within=_SUPERVISION),
    Row(
        "operator stops in a chunk",
        _STOPS,
        ("operator_stop",),
        ({"do": "stop"},),
        within=_SUPERVISION,
        horizon=8,
        options={"control.rate_hz": "30.0", "control.schedule": "blend"},
    ),
    Row("ahead, operator stops", _STOPS, ("operator_stop",), _STOP, within=_SUPERVISION, **_AHEAD),
    Row("ahead, operator disarms", _DISARMED, node=("SIGUSR2",), within=_SUPERVISION, **_AHEAD),
    _policy("fails, ahead", "raise", "inference_error", within=0.3 + _SUPERVISION, **_AHEAD),
    _policy("late, ahead", "late 0.5", "inference_late", within=0.6 + _SUPERVISION, **_AHEAD),
    _policy("answers NaN, ahead", "nan", "action_invalid", within=0.3 + _SUPERVISION, **_AHEAD),
    _camera("silent, ahead", _HOLDS, "drop", 1.0, "camera_stale", **_AHEAD),
    Row(
        "ahead, clock leaps 100 s",
        _GOES_ON,
        ("clock_jump", "frame_old", "frame_from_future"),
        ({"do": "jump", "seconds": 100.0},),
        simulated=True,
        lasts=(0.3, 0.6),
        **_AHEAD,
    ),
    Row(
        "ahead, instruction changes",
        _GOES_ON,
        begin=({"do": "instruct", "text": "wave again"},),
        end=(_WAVE,),
        within=_EASED,
        renews=True,
        **_AHEAD,
    ),
    Row("ahead at 250 Hz, operator stops", _STOPS, ("operator_stop",), _STOP, within=_SUPERVISION, **_FINE),
    Row("ahead at 250 Hz, operator disarms", _DISARMED, node=("SIGUSR2",), within=_SUPERVISION, **_FINE),
    _policy("fails, ahead at 250 Hz", "raise", "inference_error", within=_EASED, **_FINE),
    _camera("silent, ahead at 250 Hz", _HOLDS, "drop", 1.0, "camera_stale", **_FINE),
    _state("silent, ahead at 250 Hz", _HOLDS, "drop", 1.0, "joint_state_stale", **_FINE),
    Row(
        "ahead at 250 Hz, instruction changes",
        _GOES_ON,
        begin=({"do": "instruct", "text": "wave again"},),
        end=(_WAVE,),
        within=_EASED,
        renews=True,
        **_FINE,
    ),
    Row("operator disarms", _DISARMED, node=("SIGUSR2",), within=_SUPERVISION),
    Row(
        "armed during an inference",
        _DISARMED,
        node=("SIGUSR2",),
        within=_SUPERVISION,
        seconds=0.5,
        options={"timeouts.inference": "1.0", "timeouts.frame_age": "1.0"},
    ),
    Row(
        "twist, late answers",
        _GOES_ON,
        ("twist_expired",),
        ({"do": "instruct", "text": "late 0.6"},),
        (_WAVE,),
        **_SERVO,
    ),
    Row(
        "twist, camera silent",
        _HOLDS,
        ("camera_stale",),
        _frames("drop"),
        (_NO_FRAMES,),
        within=_SILENT,
        lasts=(0.6, 0.9),
        **_SERVO,
    ),
    Row("twist, operator stops", _STOPS, ("operator_stop",), ({"do": "stop"},), within=_SUPERVISION, **_SERVO),
    Row(
        "velocity, late answers",
        _GOES_ON,
        ("twist_expired",),
        ({"do": "instruct", "text": "late 0.6"},),
        (_WAVE,),
        **_VELOCITY,
    ),
    _policy("fails, velocity", "raise", "inference_error", **_VELOCITY),
    _camera("silent, velocity", _HOLDS, "drop", 1.0, "camera_stale", **_VELOCITY),
    _state("silent, velocity", _HOLDS, "drop", 1.0, "joint_state_stale", **_VELOCITY),
    Row(
        "velocity, policy server killed",
        _HOLDS,
        ("server_lost",),
        within=_SUPERVISION,
        lasts=(0.6, 0.9),
        server=("SIGKILL", "start"),
        options={**_VELOCITY["options"], "policy.name": "remote"},
        robot_words=_VELOCITY["robot_words"],
    ),
    Row("velocity, operator stops", _STOPS, ("operator_stop",), _STOP, within=_SUPERVISION, **_VELOCITY),
    Row(
        "two arms, joint states of one die",
        _HOLDS,
        ("joint_state_stale", "joint_state_invalid"),
        ({"do": "joints", "kind": "drop", "amount": 1.0, "arm": "right"},),
        ({"do": "joints", "arm": "right"},),
        within=_SILENT,
        lasts=(0.6, 0.9),
        **_ARMS,
    ),
    Row(
        "two arms, joint states of one NaN",
        _HOLDS,
        ("joint_state_invalid",),
        ({"do": "content", "kind": "nan", "arm": "right"},),
        ({"do": "content", "kind": "", "arm": "right"},),
        within=_SUPERVISION,
        **_ARMS,
    ),
    Row(
        "two arms, one driver leaves",
        _STOPS,
        ("driver_gone",),
        ({"do": "leave", "what": "command", "arm": "right"},),
        ({"do": "join", "what": "command", "arm": "right"},),
        within=_SILENT,
        lasts=(0.7, 0.9),
        **_ARMS,
    ),
    Row("two arms, operator stops", _STOPS, ("operator_stop",), _STOP, within=_SUPERVISION, **_ARMS),
    Row(
        "gripper apart, operator stops",
        _STOPS,
        ("operator_stop",),
        ({"do": "stop"},),
        within=_SUPERVISION,
        **_APART,
    ),
    Row(
        "gripper driver unsubscribes",
        _STOPS,
        ("driver_gone",),
        ({"do": "leave", "what": "gripper"},),
        ({"do": "join", "what": "gripper"},),
        within=_SILENT,
        lasts=(0.7, 0.9),
        **_APART,
    ),
    Row(
        "run_policy, its client dies",
        _HOLDS,
        ("no_instruction",),
        ({"do": "goal", "prompt": "wave on"},),
        ({"do": "join", "what": "tree"}, _WAVE),
        within=0.4 + _SUPERVISION,  # with what the goal needs to arrive
        lasts=(0.9, 1.1),
        options={"timeouts.run": "0.3"},
        robot_words=("--listens", "goals"),
    ),
    _hand("rejects", "rejected"),
    _hand("aborts", "aborted"),
    _hand("answers late", "late"),
    Row(
        "gripper action server ends",
        _STOPS,
        ("driver_gone",),
        ({"do": "leave", "what": "hand"},),
        ({"do": "join", "what": "hand"},),
        within=_SILENT,
        lasts=(0.7, 0.9),
        **_ACTION,
    ),
    Row(
        "gripper action server dies within a goal",
        _STOPS,
        ("driver_gone",),
        ({"do": "leave", "what": "hand"},),
        ({"do": "join", "what": "hand"}, {"do": "hand", "answer": "late"}),  # from the second time on
        within=_SILENT,
        lasts=(0.7, 0.9),
        **{**_ACTION, "options": {**_ACTION["options"], "timeouts.gripper": "30.0"}},
    ),
    Row(
        "gripper action server missing",
        _HOLDS,
        ("driver_missing",),
        within=0.0,
        lasts=(0.3, 0.6),
        absent="hand",
        **_ACTION,
    ),
    Row(
        "controller deactivated",
        _GOES_ON,
        (),
        ({"do": "deaf", "on": True},),
        ({"do": "deaf", "on": False},),
        lasts=(0.6, 1.0),
    ),
    Row(
        "gripper action, operator stops",
        _STOPS,
        ("operator_stop",),
        ({"do": "stop"},),
        within=_SUPERVISION,
        **_ACTION,
    ),
    Row(
        "heartbeat lost",
        _STOPS,
        ("heartbeat_lost",),
        ({"do": "heartbeat", "on": False},),
        ({"do": "heartbeat", "on": True},),
        within=0.5 + _SUPERVISION,
        lasts=(0.8, 1.0),
        options={"timeouts.heartbeat": "0.5"},
    ),
    Row(
        "driver unsubscribes",
        _STOPS,
        ("driver_gone",),
        ({"do": "leave", "what": "command"},),
        ({"do": "join", "what": "command"},),
        within=_SILENT,
        lasts=(0.7, 0.9),
    ),
    Row(
        "driver suspended",
        _HOLDS,
        ("camera_stale", "joint_state_stale"),
        robot=("SIGSTOP", "SIGCONT"),
        within=_SILENT,
        lasts=(0.8, 1.2),
        lag=1.4,
    ),
    Row(
        "driver killed",
        _HOLDS,
        ("camera_stale",),
        robot=("SIGKILL",),
        within=_SILENT,
        lasts=(0.5, 1.0),
        lease=60.0,  # its successor comes before DDS believes it dead
    ),
    Row(
        "driver killed for good",
        _STOPS,
        ("driver_gone",),
        robot=("SIGKILL",),
        within=_SILENT,
        lasts=(2.2, 2.8),
        lease=1.5,
    ),
    Row(
        "driver slow to read",
        _GOES_ON,
        (),
        ({"do": "slow", "seconds": 0.2},),
        ({"do": "slow", "seconds": 0.0},),
        lasts=(1.0, 1.2),
        lag=0.5,
    ),
    Row("node suspended", _HOLDS, node=("SIGSTOP", "SIGCONT"), within=_SUPERVISION, lasts=(0.5, 1.2), memory=1.4),
    _contested("command", _STOPS, "command_contested"),
    _contested("claim", _STOPS, "command_contested"),
    _contested("gripper", _STOPS, "command_contested", **_APART),
    _contested("joints", _HOLDS, "joint_state_contested"),
    _contested("camera", _HOLDS, "camera_contested"),
    _contested("name", _HOLDS, "name_contested"),
    *(
        # A node that stays behind would contest whatever is started next.
        Row(f"launcher {name}, uncontested", _ENDS, node=(name,), within=1.0, lasts=(1.2, 1.4), launched=True)
        for name in ("SIGTERM", "SIGKILL")
    ),
    Row("node killed", _ENDS, node=("SIGKILL",), within=_SUPERVISION, lasts=(0.1, 0.2)),
    *(
        Row(
            name,
            _GOES_ON,  # the hold lasts until every input was seen anew, a few hundredths of a second
            ("clock_jump", "frame_old", "frame_from_future"),
            ({"do": "jump", "seconds": seconds},),
            simulated=True,
            lasts=(0.3, 0.6),
        )
        # Simulated time may run fifty times as fast as real time; what is faster has jumped.
        for name, seconds in (("clock leaps 100 s", 100.0), ("clock goes back 10 s", -10.0))
    ),
    Row("disk full while recording", _GOES_ON, node=("DISK_FULL",), lasts=(0.8, 1.2), fresh=True, traced=True),
)
"""Every row, in the order of the table."""


def find(name: str) -> Row:
    """Return the row called ``name``.

    Raises:
        KeyError: There is no such row.
    """
    for row in ROWS:
        if row.name == name:
            return row
    raise KeyError(name)
