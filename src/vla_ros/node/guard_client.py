"""The node's side of its guard: starts the process, sends frames, and reads what the guard tells."""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from vla_ros.config import VELOCITY_OUTPUTS, Config
from vla_ros.config.loading import flatten
from vla_ros.config.node_topics import GUARD_HEARTBEAT, HEARTBEAT
from vla_ros.config.options import AUTO
from vla_ros.control.command import Command, lifetime, split, to_message
from vla_ros.control.reasons import Reason
from vla_ros.control.suspension import LONGEST
from vla_ros.errors import VlaRosError, WriteError
from vla_ros.execution.context import Context
from vla_ros.execution.drivers import DriverWrite, as_is
from vla_ros.graph.node import Node
from vla_ros.graph.wiring import Wiring
from vla_ros.guard.channel import ChannelError, socket_pair
from vla_ros.guard.frames import SOURCES, GuardFrame, Kind, packet_of
from vla_ros.process import SharedText, give_way

_READY = 60.0  # s until a guard has started on a busy machine
_SILENT = 0.5  # s without a report, ten of which are missing then
_ANSWER = 0.2  # s for the answer to a reset
_ENDS = 1.0  # s
_LOOKS = 0.002  # s between looks for an answer
_KEEP_ALIVE = 0.1  # s between keep-alives
_COLD = 0.01  # s after which a guard that has done nothing needs longer for the next command
_SPARE = 1.0  # s that a keep-alive lasts longer than the longest inference
_SECTIONS = ("robot", "control", "gripper", "limits", "timeouts", "topics", "takeover", "guard", "node")
_OF_ARM = ("command", "gripper", "joint_states")
_HOLDS = ("lapsed", "dropped", "suspended", "unsent")  # events after which the guard waits for a hold of the node
_REACTIONS = {"expired": Reason.VELOCITY_EXPIRED, Reason.GRIPPER_FAILED.value: Reason.GRIPPER_FAILED}
_RESTART = "no command reaches a driver any more; restart the node"


def options_text(config: Config, resolve: Callable[[str], str]) -> str:
    """Return the options that a guard needs, as JSON by flat name, with the names on the graph resolved."""
    arms = {f"{arm.name}" for arm in config.arms if config.robot.arms}
    values = {
        name: value for name, value in flatten(config).items() if name.partition(".")[0] in {*_SECTIONS, *arms}
    }
    named = [f"topics.{leaf}" for leaf in (*_OF_ARM, "servo", "stop")]
    named += [f"{arm}.{leaf}" for arm in arms for leaf in _OF_ARM]
    values |= {name: resolve(values[name]) for name in named if values[name]}
    return json.dumps(values)


def start_guard(config: Config, node: Node, wiring: Wiring) -> "GuardClient | None":
    """Start the guard of a node, if ``guard.process`` asks for one; it ends when everything else is closed."""
    moves_on = any(arm.output in VELOCITY_OUTPUTS for arm in config.arms) and config.node.clock != "inputs"
    if config.guard.process == "false" or (config.guard.process == AUTO and not moves_on):
        return None
    guard = GuardClient(config, node, wiring.graph.backend)
    wiring.on_close(guard.close)
    return guard


def frame_of(command: Command, index: int, fingers: Sequence[str], **fields: Any) -> GuardFrame:
    """Return the frame of a command for the arm at ``index``, whose gripper has the joints ``fingers``.

    ``fields`` are the frame's ``time``, ``holds`` and ``source``.
    """
    known = dict(zip(command.names, command.positions.tolist(), strict=True))
    if command.twist is not None:
        kind, numbers = Kind.TWIST, [*command.twist[0].tolist(), *command.twist[1].tolist()]
    elif command.velocities is not None:
        kind, numbers = Kind.VELOCITIES, [*command.velocities.values()]
    else:
        kind, numbers = Kind.POSITIONS, [known[name] for name in command.names if name not in fingers]
    joints, publisher = command.limited_by
    return GuardFrame(
        Kind.HOLD if command.hold else kind,
        arm=index,
        values=np.array(numbers + [known.get(name, np.nan) for name in fingers]),
        duration=command.duration,
        stamp=command.stamp,
        joints=joints,
        publisher=publisher,
        **fields,
    )


class GuardClient:
    """Starts a guard; :meth:`open` waits for it. Implements :class:`vla_ros.execution.outputs.GuardEnd`.

    Raises VlaRosError if no process starts.
    """

    def __init__(self, config: Config, node: Node, backend: str) -> None:
        self._node, self._lock = node, threading.RLock()
        self._channel, theirs = socket_pair()
        end, told = theirs.socket.fileno(), os.memfd_create("vla_guard")
        asked = {
            "channel": end,
            "told": told,
            "process": os.getpid(),
            "name": f"{node.get_name()}_guard",
            "namespace": node.get_namespace(),
            "backend": backend,
            "log_level": config.node.log_level,
            "heartbeats": [node.resolve_topic_name(each) for each in (HEARTBEAT, GUARD_HEARTBEAT)],
            "simulated": bool(getattr(node.get_clock(), "ros_time_is_active", False)),
        }
        command = [sys.executable, "-m", "vla_ros.guard", json.dumps(asked)]
        try:
            # A session of its own, so that Ctrl-C reaches the node first, whose last holds are sent.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=[end, told]
            )
        except OSError as error:
            raise VlaRosError(f"guard.process: no guard starts: {error}") from error
        theirs.socket.close()  # here, not for the guard
        self._tells = SharedText(told)
        self._counter, self._options = 0, ""
        self._told: Mapping[str, Any] = {}
        self._judged: Mapping[str, Any] = self._told  # the report that look() has seen last
        self._heard = self._looked = self._kept_alive = time.monotonic()
        self._seen: Counter[str] = Counter()
        self._failure = self._lost = ""
        self.gids: dict[str, bytes] = {}
        self.subscribers = "", 0

    def open(self, context: Context, wiring: Wiring) -> "GuardClient":
        """Send the options, and wait until the guard has its endpoints. Raises VlaRosError if it fails."""
        self._context, self._wiring = context, wiring
        config = context.options.current
        self._arms = {arm.name: (index, arm) for index, arm in enumerate(config.arms)}
        taken = [
            wiring.node.resolve_topic_name(t) for arm in config.arms for t in (arm.command, arm.gripper_topic) if t
        ]
        self._taps = {topic: wiring.taps.pop(topic) for topic in taken if topic in wiring.taps}
        self.configure(config)
        until = time.monotonic() + _READY
        while not self.gids:
            select.select([self._channel.socket], [], [], _LOOKS)
            self._read()
            if self._lost or time.monotonic() > until:
                why = self._lost or "no answer"
                raise VlaRosError(f"the guard does not start: {why}; without one: guard.process:=false")
        give_way(self._process.pid)
        return self

    def writes(self, command: Command) -> list[DriverWrite]:
        index, arm = self._arms[command.arm]
        frame = frame_of(
            command,
            index,
            arm.robot.gripper_joint_names,
            time=time.monotonic_ns(),
            lifetime=self._lifetime(moves_on=command.moves_on),
            source=SOURCES.index(self._context.safety.source),
        )
        return [DriverWrite(arm.command, lambda: frame, as_is, partial(self._send_command, command))]

    def look(self) -> Mapping[Reason, str]:
        with self._lock:
            now = time.monotonic()
            if now - self._looked > LONGEST:  # this process did not run
                self._heard += now - self._looked
            self._looked = now
            self._read()
            if not self._lost and now - self._heard > _SILENT:
                self._lost = f"it has not reported for {now - self._heard:.2g} s"
            if self._lost:
                return {Reason.GUARD_LOST: f"{self._lost}; {_RESTART}"}
            events, stopped = self._told.get("events", {}), self._told.get("stopped")
            new = Counter[str]()
            if self._told is not self._judged:
                self._judged = self._told
                new = Counter(self._told["counts"]) - self._seen
                self._seen += new
        for event, reason in _REACTIONS.items():
            for _ in range(new[event]):
                self._context.safety.react(reason, events.get(event, ""))
        held = [f"{event}: {events.get(event, '')}" for event in _HOLDS if new[event]]
        if held and not stopped:
            raise WriteError(f"the guard holds by itself ({'; '.join(held)})")
        return {Reason[stopped[0].upper()]: f"{stopped[1]} (in the guard)"} if stopped else {}

    def keep_alive(self, *, steps: bool) -> None:
        now = time.monotonic()
        if now - self._kept_alive < (_COLD if steps else _KEEP_ALIVE) or not self.gids:
            return
        self._kept_alive = now
        for index, _ in self._arms.values():
            self._try(GuardFrame(Kind.KEEPALIVE, arm=index, lifetime=self._lifetime(moves_on=False)))

    def configure(self, config: Config) -> None:
        text = options_text(config, self._node.resolve_topic_name)
        with self._lock:
            if text != self._options and not self._lost:
                self._options = text
                self._counter += 1
                self._write(packet_of(GuardFrame(Kind.OPTIONS, self._counter, text=text)))

    def stop(self) -> None:
        """Tell the guard that the node has stopped."""
        if self.gids:
            self._try(GuardFrame(Kind.STOP))

    def reset(self) -> str:
        """End a stop of the guard; return why it cannot be ended, or ""."""
        if not self.gids:
            return ""
        with self._lock:
            before, until = self._resets, time.monotonic() + _ANSWER
            self._try(GuardFrame(Kind.RESET))
            while self._resets == before and not self._lost and time.monotonic() < until:
                select.select([self._channel.socket], [], [], _LOOKS)
                self._read()
            if self._resets > before:
                return ""
            return f"the guard did not answer{self._lost and ': ' + self._lost}; {_RESTART}"

    def report(self) -> Mapping[str, Any]:
        """State, age of the last report and counts, for ``~/status`` and ``/diagnostics``."""
        age = 1e3 * (time.monotonic() - self._heard)
        state = "lost" if self._lost else self._told.get("state", "starting")
        figures = {name: self._told[name] for name in ("slowest_ms", "periods") if name in self._told}
        return {"state": state, "age_ms": round(age, 1), **figures, "counts": self._told.get("counts", {})}

    def close(self) -> None:
        """End the guard, which holds first, and wait for that."""
        self._channel.close()
        try:
            self._process.wait(_ENDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_ENDS)

    @property
    def _resets(self) -> int:
        return int(self._told.get("counts", {}).get("reset", 0))

    def _lifetime(self, *, moves_on: bool) -> int:
        config = self._context.options.current
        return round(1e9 * (lifetime(config) if moves_on else config.timeouts.inference + _SPARE))

    def _send_command(self, command: Command, frame: GuardFrame) -> None:
        with self._lock:
            if self._lost:
                raise VlaRosError(f"the guard is lost: {self._lost}")
            self._send(frame)
        if self._taps:
            self._record(command)

    def _try(self, frame: GuardFrame) -> None:
        with suppress(VlaRosError):  # look() reports it
            self._send(frame)

    def _send(self, frame: GuardFrame) -> None:
        with self._lock:
            self._counter += 1
            armings = self._context.safety.armings
            made = frame.time or time.monotonic_ns()
            self._write(packet_of(frame._replace(counter=self._counter, time=made, armings=armings)))

    def _write(self, packet: bytes) -> None:
        try:
            self._channel.send(packet)
        except ChannelError as error:
            self._lost = self._lost or str(error)
            self._channel.close()
            raise VlaRosError(str(error)) from error

    def _read(self) -> None:
        """Read what the guard has told. The caller holds the lock, or is the only thread."""
        if self._lost:
            return
        text, now = self._tells.read(), time.monotonic()
        if text is not None:
            self._told, self._heard = json.loads(text), now
        elif now - self._heard > _KEEP_ALIVE:
            for _ in self._channel.take():  # nothing, but it may be closed
                pass
        if "error" in self._told:
            self._lost = str(self._told["error"])
        elif self._told:
            topic, count = self._told["subscribers"]
            self.subscribers = topic, count
            self.gids = self.gids or {name: bytes.fromhex(gid) for name, gid in self._told["gids"].items()}
        if self._channel.is_closed and not self._lost:
            self._lost = f"its process has ended (status {self._process.poll()})"

    def _record(self, command: Command) -> None:
        """Pass a command that was sent to the recorder."""
        arm, graph = self._arms[command.arm][1], self._wiring.graph
        body, fingers = split(command, arm.robot.gripper_joint_names if arm.gripper_topic else ())
        for topic, part, output in (
            (arm.command, body, arm.output),
            (arm.gripper_topic, fingers, arm.gripper.output),
        ):
            tap = self._taps.get(self._node.resolve_topic_name(topic)) if topic else None
            if tap is not None and part is not None:
                tap(graph.serialize(to_message(part, output, graph.message, self._context.clock.ros())), 0)
