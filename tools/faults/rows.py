"""The fault table."""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from tools.faults.processes import freezer
from tools.faults.row import Order, Reaction, Row
from tools.faults.setups import (
    ACTION,
    AHEAD,
    APART,
    ARMS,
    DEPTH,
    FINE,
    LEADS,
    LONG,
    MEETING,
    ON_A_LINK,
    PAD,
    SERVO,
    SINGLE,
    VELOCITY,
    WALLED,
)

_SUPERVISION = 0.1  # s; allowance for a watchdog that runs every 20 ms on a busy machine
_SILENT = 0.3 + _SUPERVISION
_EASED = 0.3 + _SUPERVISION  # s; allowance for a pending inference and the deceleration
_ASLEEP = (0.3, 5.0)  # s
_PUSHED = 0.4  # rad
_NOTICED = 0.35  # s; with the grace of every row, half a second
_FALLS_SILENT: dict[str, Any] = {"within": _SILENT, "lasts": (0.6, 0.9)}
_WAVE = {"do": "instruct", "text": "wave"}
_CARRIES = {"policy.instruction": "carry", "gripper.mode": "binary"}


_GOES_ON, _HOLDS, _STOPS = Reaction.GOES_ON, Reaction.HOLDS, Reaction.STOPS
_DISARMED, _ENDS = Reaction.DISARMED, Reaction.ENDS
_STOP: tuple[Order, ...] = ({"do": "stop"},)


def _faulty(do: str, kind: str, amount: float = 1.0) -> tuple[Order, ...]:
    return ({"do": do, "kind": kind, "amount": amount},)


def _switched(
    name: str, reaction: Reaction, reasons: tuple[str, ...], do: str, begin: Order, end: Order, **more: Any
) -> Row:
    """Return a row in which the same order, with other words, begins and ends the fault."""
    return Row(name, reaction, reasons, ({"do": do, **begin},), ({"do": do, **end},), **more)


def _instructed(name: str, reaction: Reaction, reasons: tuple[str, ...], text: str, **more: Any) -> Row:
    return _switched(name, reaction, reasons, "instruct", {"text": text}, {"text": "wave"}, **more)


def _message(
    do: str, name: str, reaction: Reaction, kind: str, amount: float = 1.0, *reasons: str, **more: Any
) -> Row:
    """Return a row in which a channel (``frames`` or ``joints``) damages or loses messages."""
    more = (_FALLS_SILENT if reaction is _HOLDS else {}) | more
    source = "camera" if do == "frames" else "joint states"
    return _switched(f"{source} {name}", reaction, reasons, do, {"kind": kind, "amount": amount}, {}, **more)


_camera, _state = partial(_message, "frames"), partial(_message, "joints")


def _content(kind: str) -> Row:
    # A missing joint keeps its last position until timeouts.joint_state has passed.
    unnamed = kind in ("missing", "renamed", "none")
    more = _FALLS_SILENT if unnamed else {"within": _SUPERVISION, "lasts": (0.3, 0.6)}
    reasons = ("joint_state_invalid", "joint_state_stale") if unnamed else ("joint_state_invalid",)
    words = {"kind": kind}, {"kind": ""}
    return _switched(f"joint states {kind}", _HOLDS, reasons, "content", *words, pieces=unnamed, **more)


def _policy(name: str, text: str, reason: str, within: float = _SUPERVISION, **more: Any) -> Row:
    return _instructed(f"policy {name}", _HOLDS, (reason,), text, within=within, lasts=(0.5, 0.8), **more)


def _operator(name: str, **more: Any) -> Row:
    return Row(name, _STOPS, ("operator_stop",), _STOP, within=_SUPERVISION, **more)


def _leaves(name: str, what: str, *then: Order, **more: Any) -> Row:
    """Return a row in which a driver unsubscribes or an action server ends."""
    arm = {"arm": more["arms"][-1]} if "arms" in more else {}
    begin, end = ({"do": do, "what": what} | arm for do in ("leave", "join"))
    return Row(name, _STOPS, ("driver_gone",), (begin,), (end, *then), within=_SILENT, lasts=(0.7, 0.9), **more)


def _late(name: str, **more: Any) -> Row:
    """Return a row in which inferences take longer than a velocity lasts."""
    return _instructed(f"{name}, late answers", _GOES_ON, ("velocity_expired",), "late 0.6", **more)


def _instruction(name: str, **more: Any) -> Row:
    more |= {"within": _EASED, "renews": True}
    return _instructed(f"{name}, instruction changes", _GOES_ON, (), "wave again", **more)


def _clock(name: str, by: float, **more: Any) -> Row:
    """Return a row in which simulated time jumps; the hold lasts until every input has arrived again."""
    jump = ({"do": "jump", "seconds": by},)
    reasons = ("clock_jump", "frame_old", "frame_from_future")
    return Row(name, _GOES_ON, reasons, jump, simulated=True, lasts=(0.3, 0.6), **more)


def _hand(name: str, answer: str) -> Row:
    """Return a row in which a gripper's action does not execute a goal; the arm continues."""
    lasts = (2.4, 2.7)  # one second after the previous goal, timeouts.gripper, and one second to the next status
    words = {"answer": answer}, {"answer": "done"}
    return _switched(f"gripper action {name}", _GOES_ON, ("gripper_failed",), "hand", *words, lasts=lasts, **ACTION)


_UNREADABLE = ("inference_error", "server_lost")


def _server(
    name: str,
    *what: str,
    reasons: tuple[str, ...] = ("server_lost",),
    ahead: bool = False,
    max_response: str = "64",
) -> Row:
    more = dict(AHEAD) if ahead else {"options": {}}
    more["options"] = {**more["options"], "policy.name": "remote", "policy.max_response": max_response}
    return Row(
        f"server {name}",
        _HOLDS,
        reasons,
        within=0.5 * ahead + _SUPERVISION,
        lasts=(0.6, 0.9),
        server=what if len(what) > 1 else (*what, ""),
        **more,
    )


def _long_plan(schedule: str) -> Row:
    """Return a row in which a plan of five seconds outlives the server."""
    options = {**LONG["options"], "control.schedule": schedule, "policy.name": "remote"}
    return Row(
        f"server killed, long plan, {schedule}",
        _HOLDS,
        ("server_lost",),
        within=0.1 + 0.5 + _SUPERVISION,  # until the loss is noticed, and timeouts.server_lost
        lasts=(0.9, 1.2),
        server=("SIGKILL", "start"),
        **{**LONG, "options": options},
    )


def _contested(what: str, reaction: Reaction, reason: str, **more: Any) -> Row:
    """Return a row in which a second node or publisher does what only one may do."""
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


def _suspended(
    name: str,
    reaction: Reaction = _HOLDS,
    reason: str = "suspended",
    begin: tuple[Order, ...] = (),
    signals: tuple[str, str] = ("SIGSTOP", "SIGCONT"),
    **more: Any,
) -> Row:
    """Return a row in which somebody pushes the arm while the node is suspended."""
    return Row(
        f"node suspended{name}",
        reaction,
        (reason,),
        ({"do": "push", "by": _PUSHED}, *begin),
        node=signals,
        within=_SUPERVISION,
        suspended=True,
        **{"lasts": _ASLEEP, **more},
    )


def _person(name: str, fault: str, reason: str, within: float = _SUPERVISION, **more: Any) -> Row:
    """Return a row in which the input of a person who corrects fails; the arm waits for the person."""
    begin, end = ({"do": "person", "fault": each} for each in (fault, ""))
    then: tuple[Order, ...] = more.pop("end", ())
    return Row(
        name, _HOLDS, (reason,), (begin,), (end, *then), within=within, corrects=True,
        **{"lasts": (within + 0.3, within + 0.6), **LEADS, **more},
    )  # fmt: skip


def _takeover(
    name: str,
    *begin: Order,
    reaction: Reaction = _GOES_ON,
    end: tuple[Order, ...] = (),
    after: float = 0.0,
    **more: Any,
) -> Row:
    """Return a row in which a person takes over, ``after`` seconds into another fault, and hands back."""
    options = {**LEADS["options"], **more.pop("options", {})}
    back = {"do": "ask", "what": "policy", "after": 0.3}
    take = () if reaction is _STOPS else (_take(after),)  # a stopped node is asked once it has stopped
    return Row(
        f"takeover {name}", reaction, more.pop("reasons", ()), (*begin, *take), (*end, back),
        **{**LEADS, "lasts": (0.6, 0.9), **more, "options": options},
    )  # fmt: skip


def _take(after: float = 0.0) -> Order:
    return {"do": "ask", "what": "correct", "after": after}


def _walls(name: str, **more: Any) -> Row:
    """Return a row in which walls appear around the hand, until it has been held in front of one."""
    row = {**WALLED, "until": True, **more, "options": {**WALLED["options"], **more.get("options", {})}}
    reasons = ("collision_scene", "collision_self")  # some arms wander for half a minute between the walls
    words = {"kind": "walls"}, {"kind": ""}
    return _switched(f"obstacle appears{name}", _GOES_ON, reasons, "scene", *words, **row)


def _scene(name: str, kind: str, reason: str = "scene_stale") -> Row:
    """Return a row in which no message tells the obstacles any more."""
    words, more = ({"kind": kind}, {"kind": ""}), {**_FALLS_SILENT, **WALLED}
    return _switched(f"scene {name}", _HOLDS, (reason,), "scene", *words, **more)


def _depth(name: str, kind: str, reason: str, within: float, **more: Any) -> Row:
    """Return a row in which a depth camera, its CameraInfo or its transforms fail."""
    words, more = ({"kind": kind}, {"kind": ""}), {"lasts": (0.6, 0.9), "within": within, **DEPTH, **more}
    return _switched(f"depth {name}", _HOLDS, (reason,), "depth", *words, **more)


_RECORDED = {"record.what": "all"}
_WAITED = 0.1 + _SUPERVISION  # s; for a transform

ROWS: tuple[Row, ...] = (
    _camera("silent", _HOLDS, "drop", 1.0, "camera_stale"),
    _camera("loses half", _GOES_ON, "drop", 0.5),
    _camera("late 0.2 s", _GOES_ON, "delay", 0.2),
    _camera("late 0.6 s", _HOLDS, "delay", 0.6, "frame_old", "camera_stale", lasts=(1.0, 1.3)),
    _camera("jitter", _GOES_ON, "jitter", 0.1),
    _camera("duplicated", _GOES_ON, "duplicate", 2),
    _camera("reordered", _GOES_ON, "reorder", 4),
    _camera("in bursts", _GOES_ON, "burst", 6),
    # Six received frames, which take more than six periods on a busy machine.
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
        **_FALLS_SILENT,
    ),
    _depth("stale", "silent", "camera_stale", _SILENT),
    _depth("transform missing", "lost", "transform_missing", _WAITED),
    # A person resets, because nobody else knows which pose is right. SIGCONT is nothing to a process that runs.
    _depth("transform jumps", "moved", "transform_jumped", _SUPERVISION, node=("SIGCONT", "SIGHUP")),
    _depth("CameraInfo size", "size", "camera_info_invalid", _SUPERVISION),
    _depth("blind", "blind", "image_invalid", _SILENT),
    _depth("transform contradicted", "two", "transform_jumped", _SUPERVISION, node=("SIGCONT", "SIGHUP")),
    # By the URDF and joint states, which arrive too late for the images of their time.
    _state("late 0.3 s, depth", _HOLDS, "delay", 0.3, "transform_missing", within=0.3 + _WAITED, **ON_A_LINK),
    _state("silent", _HOLDS, "drop", 1.0, "joint_state_stale"),
    _state("late 0.15 s", _GOES_ON, "delay", 0.15),
    _state("late 0.6 s", _HOLDS, "delay", 0.6, "joint_state_stale", lasts=(1.0, 1.3)),
    _state("frozen", _HOLDS, "repeat", 1.0, "joint_state_stale"),
    _state("reordered", _GOES_ON, "reorder", 4),
    _state("bits flip", _GOES_ON, "corrupt", 2, pieces=True),
    *(_content(kind) for kind in ("nan", "infinite", "missing", "short", "outside", "renamed", "none")),
    _switched("joint states zero", _GOES_ON, ("joint_state_invalid",), "content", {"kind": "zero"}, {"kind": ""}),
    _policy("late", "late 0.5", "inference_late", within=0.3 + _SUPERVISION),
    _policy("raises", "raise", "inference_error"),
    _policy("answers NaN", "nan", "action_invalid"),
    _policy("answers infinity", "infinite", "action_invalid"),
    _policy("answers 1e30", "absurd", "action_invalid"),
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
    _server("sends megabytes", "oversize", reasons=_UNREADABLE, max_response="1"),
    _server("answers with errors", "error", reasons=("inference_error",)),
    _server("killed, ahead", "SIGKILL", "start", ahead=True),
    _long_plan("blend"),
    _long_plan("sync"),
    _server("loses answers, ahead", "lose", reasons=("server_lost", "inference_late"), ahead=True),
    _server("mixes answers up, ahead", "mix", reasons=_UNREADABLE, ahead=True),
    _server("delays answers, ahead", "delay", reasons=("server_lost", "inference_late"), ahead=True),
    _operator("operator stops"),
    _operator(
        "operator stops in a chunk", horizon=8, options={"control.rate_hz": "30.0", "control.schedule": "blend"}
    ),
    _operator("ahead, operator stops", **AHEAD),
    Row("ahead, operator disarms", _DISARMED, node=("SIGUSR2",), within=_SUPERVISION, **AHEAD),
    _policy("fails, ahead", "raise", "inference_error", within=0.3 + _SUPERVISION, **AHEAD),
    _policy("late, ahead", "late 0.5", "inference_late", within=0.6 + _SUPERVISION, **AHEAD),
    _policy("answers NaN, ahead", "nan", "action_invalid", within=0.3 + _SUPERVISION, **AHEAD),
    _camera("silent, ahead", _HOLDS, "drop", 1.0, "camera_stale", **AHEAD),
    _clock("ahead, clock leaps 100 s", 100.0, **AHEAD),
    _instruction("ahead", **AHEAD),
    _operator("ahead at 250 Hz, operator stops", **FINE),
    Row("ahead at 250 Hz, operator disarms", _DISARMED, node=("SIGUSR2",), within=_SUPERVISION, **FINE),
    _policy("fails, ahead at 250 Hz", "raise", "inference_error", within=_EASED, **FINE),
    _camera("silent, ahead at 250 Hz", _HOLDS, "drop", 1.0, "camera_stale", **FINE),
    _state("silent, ahead at 250 Hz", _HOLDS, "drop", 1.0, "joint_state_stale", **FINE),
    _instruction("ahead at 250 Hz", **FINE),
    _operator("single steps at 250 Hz, operator stops", **SINGLE),
    _policy("late, single steps at 250 Hz", "late 0.5", "inference_late", within=0.6 + _SUPERVISION, **SINGLE),
    _camera("silent, single steps at 250 Hz", _HOLDS, "drop", 1.0, "camera_stale", **SINGLE),
    Row("operator disarms", _DISARMED, node=("SIGUSR2",), within=_SUPERVISION),
    Row(
        "armed during an inference",
        _DISARMED,
        node=("SIGUSR2",),
        within=_SUPERVISION,
        seconds=0.5,
        options={"timeouts.inference": "1.0", "timeouts.frame_age": "1.0"},
    ),
    _late("twist", **SERVO),
    _camera("silent, twist", _HOLDS, "drop", 1.0, "camera_stale", **SERVO),
    _operator("twist, operator stops", **SERVO),
    _late("velocity", **VELOCITY),
    _policy("fails, velocity", "raise", "inference_error", **VELOCITY),
    _camera("silent, velocity", _HOLDS, "drop", 1.0, "camera_stale", **VELOCITY),
    _state("silent, velocity", _HOLDS, "drop", 1.0, "joint_state_stale", **VELOCITY),
    Row(
        "velocity, policy server killed",
        _HOLDS,
        ("server_lost",),
        within=_SUPERVISION,
        lasts=(0.6, 0.9),
        server=("SIGKILL", "start"),
        **{**VELOCITY, "options": {**VELOCITY["options"], "policy.name": "remote"}},
    ),
    _operator("velocity, operator stops", **VELOCITY),
    _switched(
        "two arms, joint states of one die",
        _HOLDS,
        ("joint_state_stale", "joint_state_invalid"),
        "joints",
        {"kind": "drop", "amount": 1.0, "arm": "right"},
        {"arm": "right"},
        **_FALLS_SILENT,
        **ARMS,
    ),
    _switched(
        "two arms, joint states of one NaN",
        _HOLDS,
        ("joint_state_invalid",),
        "content",
        {"kind": "nan", "arm": "right"},
        {"kind": "", "arm": "right"},
        within=_SUPERVISION,
        **ARMS,
    ),
    _leaves("two arms, one driver leaves", "command", **ARMS),
    _operator("two arms, operator stops", **ARMS),
    _operator("gripper apart, operator stops", **APART),
    _leaves("gripper driver unsubscribes", "gripper", **APART),
    Row(
        "run_policy, its client dies",
        _HOLDS,
        ("no_instruction",),
        ({"do": "goal", "prompt": "wave on"},),
        ({"do": "join", "what": "tree"}, _WAVE),
        within=0.4 + _SUPERVISION,  # including the time for the goal to arrive
        lasts=(0.9, 1.1),
        options={"timeouts.run": "0.3"},
        robot_words=("--listens", "goals"),
    ),
    _hand("rejects", "rejected"),
    _hand("aborts", "aborted"),
    _hand("answers late", "late"),
    _leaves("gripper action server ends", "hand", **ACTION),
    _leaves(
        "gripper action server dies within a goal",
        "hand",
        {"do": "hand", "answer": "late"},  # takes effect in the second injection
        **{**ACTION, "options": {**ACTION["options"], "timeouts.gripper": "30.0"}},
    ),
    Row("gripper action server missing", _HOLDS, ("driver_missing",), absent="hand", **ACTION),
    *(
        _switched(f"arm {kind}", _GOES_ON, (), "arm", {"kind": kind}, {"kind": ""}, lasts=(0.6, 1.5))
        for kind in ("sags", "lags", "sticks")
    ),
    _switched(
        "arm blocked",
        _GOES_ON,
        ("following_error",),
        "arm",
        {"kind": "blocked"},
        {"kind": ""},
        until=True,
        options={"limits.following_error": "0.1"},
    ),
    _switched("controller deactivated", _GOES_ON, (), "deaf", {"on": True}, {"on": False}, lasts=(0.6, 1.0)),
    _operator("gripper action, operator stops", **ACTION),
    _switched(
        "heartbeat lost",
        _STOPS,
        ("heartbeat_lost",),
        "heartbeat",
        {"on": False},
        {"on": True},
        within=0.5 + _SUPERVISION,
        lasts=(0.8, 1.0),
        options={"timeouts.heartbeat": "0.5"},
    ),
    _leaves("driver unsubscribes", "command"),
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
        lease=60.0,  # the next driver starts before DDS considers the killed one dead
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
    _switched(
        "driver slow to read", _GOES_ON, (), "slow", {"seconds": 0.2}, {"seconds": 0.0}, lasts=(1.0, 1.2), lag=0.5
    ),
    _suspended(""),
    _suspended(", operator stops", _STOPS, "operator_stop", _STOP),
    _suspended(
        ", camera dead", _HOLDS, "camera_stale", _faulty("frames", "drop"), end=({"do": "frames"},), wakes=0.8
    ),
    _suspended(", successor starts", _STOPS, "command_contested", successor=True, lasts=(0.1, 0.3)),
    _suspended(", ahead at 250 Hz", **FINE),
    _suspended(", twist", lasts=(0.35, 1.2), memory=2.0, **SERVO),  # a busy machine resumes it late
    _suspended(" by cgroup", signals=("FREEZE", "THAW")),
    _instructed(
        "node's log stalls",
        _HOLDS,
        ("joint_state_stale", "camera_stale", "suspended"),
        "wave again",  # logged within a second, by the thread that receives
        node=("LOG_STALLS", "LOG_FLOWS"),
        within=1.0 + _SILENT,
        lasts=(2.0, 2.5),
    ),
    _contested("command", _STOPS, "command_contested"),
    _contested("claim", _STOPS, "command_contested"),
    _contested("gripper", _STOPS, "command_contested", **APART),
    _contested("joints", _HOLDS, "joint_state_contested"),
    _contested("camera", _HOLDS, "camera_contested"),
    _contested("scene", _HOLDS, "scene_contested", **WALLED),
    _contested("name", _HOLDS, "name_contested"),
    *(
        # A node that is left behind would contest the next one.
        Row(f"launcher {name}, uncontested", _ENDS, node=(name,), within=1.0, lasts=(1.2, 1.4), launched=True)
        for name in ("SIGTERM", "SIGKILL")
    ),
    Row("node killed", _ENDS, node=("SIGKILL",), within=_SUPERVISION, lasts=(0.1, 0.2)),
    _clock("clock leaps 100 s", 100.0),
    _clock("clock goes back 10 s", -10.0),
    _person("leader dies", "dies", "person_stale", 0.2 + _SUPERVISION, end=(_take(0.1),)),
    _person("leader freezes", "freezes", "person_frozen", 0.5 + _SUPERVISION),
    _person("leader jumps", "jumps", "person_far"),
    _person("leader sends NaN", "nan", "person_invalid"),
    _person("leader sends another arm's joints", "other", "person_invalid"),
    _person("two leaders", "second", "person_contested", _NOTICED),
    _person("dead-man sticks", "sticks", "person_stuck", 0.8 + _SUPERVISION, **PAD),
    _person("dead-man released", "lets go", "person_released", **{**PAD, "lasts": (1.2, 1.5)}),  # its status comes
    _takeover(
        "while held",
        *_faulty("joints", "drop"),
        reaction=_HOLDS,
        reasons=("joint_state_stale",),
        within=_SILENT,
        after=0.5,
        end=({"do": "joints"},),
    ),
    _takeover(
        "while contested",
        {"do": "intrude", "what": "command"},
        reaction=_STOPS,
        reasons=("command_contested",),
        within=_NOTICED,
        lasts=(0.8, 1.2),
        end=({"do": "withdraw"},),
    ),
    _takeover("during a late inference", {"do": "instruct", "text": "late 0.5"}, after=0.1, end=(_WAVE,)),
    _takeover("in a chunk, ahead", **AHEAD),
    _takeover("in a chunk, ahead at 250 Hz", **FINE),
    _takeover("between single steps at 250 Hz", **SINGLE),
    _takeover(
        "while the server is gone",
        reasons=("server_lost",),
        after=0.3,
        server=("SIGKILL", "start"),
        options={"policy.name": "remote"},
    ),
    Row(
        "takeover requests storm",
        _GOES_ON,
        (),
        ({"do": "ask", "what": "correct", "more": 100},),
        ({"do": "ask", "what": "policy", "after": 0.3},),
        lasts=(0.6, 0.9),
        storms=True,
        **LEADS,
    ),
    _walls(""),
    _walls(", attached object", options={"collision.held": "box 0.04 0.04 0.15 at 0 0 0.05"} | _CARRIES),
    _walls(", no collision elements", urdf="visual"),
    _scene("stale", "silent"),
    _scene("malformed", "malformed"),
    _scene("mesh broken", "mesh", "collision_scene"),
    Row("mesh of the URDF broken", _STOPS, within=_SUPERVISION, refused="truncated", **WALLED),
    _instructed("two arms meeting", _GOES_ON, ("collision_self",), "meet", until=True, **MEETING),
    Row("disk full while recording", _GOES_ON, node=("DISK_FULL",), lasts=(0.8, 1.2), fresh=True, traced=True),
    Row("recorder killed", _GOES_ON, node=("RECORDER_KILLED",), options=_RECORDED, recorded="repaired"),
    Row(
        "recorder's disk full",
        _GOES_ON,
        node=("RECORDER_DISK_FULL",),
        lasts=(0.8, 1.2),
        options=_RECORDED,
        fresh=True,
        recorded="left",
    ),
    Row(
        "recorder's bag removed",
        _GOES_ON,
        node=("BAGS_REMOVED",),
        options=_RECORDED,
        fresh=True,
        recorded="removed",
    ),
)
"""Every row, in the order of the table."""


_EMBEDDED = ("action", "goals")  # the robot's action server and client are the embedded participant's


def runnable(rows: Sequence[Row], backend: str) -> list[Row]:
    """Return the rows that can be run on this backend and, with rclpy, on the RMW of the environment.

    Fast DDS takes no lease from the environment. Without a cgroup freezer, no row freezes the node.
    """
    shorter = backend == "rclpy" and os.environ.get("RMW_IMPLEMENTATION") != "rmw_cyclonedds_cpp"
    return [
        row
        for row in rows
        if not (backend == "rclpy" and set(_EMBEDDED) & set(row.robot_words))
        and not (shorter and 0 < row.lease < 10)
        and not ("FREEZE" in row.node and freezer() is None)
    ]


def find(name: str) -> Row:
    """Return the row called ``name``.

    Raises:
        KeyError: There is no such row.
    """
    return {row.name: row for row in ROWS}[name]
