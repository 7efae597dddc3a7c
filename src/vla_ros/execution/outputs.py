"""Publishes commands to the drivers of the arms and of grippers that have their own driver.

Everything is sent through a :class:`~vla_ros.execution.gate.CommandGate`, so that no two threads send at once and
no motion follows a stop.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from vla_ros.config.sections import GRIPPER_ACTIONS
from vla_ros.control.command import Command, lifetime, message_type, split, to_message
from vla_ros.errors import WriteError
from vla_ros.execution.context import Context
from vla_ros.execution.gripper_goals import GripperGoals
from vla_ros.graph.wiring import Wiring

SERVO_TYPE = "moveit_msgs/srv/ServoCommandType"
_TWIST = 1  # value of the request's command_type
_PERIOD = 0.1  # s
_RETRY = 1.0  # s; after a call that was refused or not answered
_AHEAD = 0.01  # s; clocks of cameras that are synchronised differ by less
_STARTS_NOW = (
    "frames or joint states are stamped {:.3g} s ahead of this clock; trajectories start now instead of then. "
    "Synchronise the clocks (chrony, PTP), or let the driver stamp on arrival"
)


class Outputs:
    """Publishes commands; ``gids`` maps each resolved command topic to its publisher's id in discovery.

    ``write_failed`` is called with the error of what is sent later, a gripper's goal; assign it.
    """

    def __init__(self, context: Context, wiring: Wiring) -> None:
        self._context = context
        self._make, self._serialize = wiring.graph.message, wiring.graph.serialize
        self._publishers: dict[str, Any] = {}
        self._goals: dict[str, GripperGoals] = {}  # by the action's name
        self.write_failed: Callable[[WriteError], object] = lambda _: None
        self.gids: dict[str, bytes] = {}
        self._arms = {arm.name: arm for arm in context.options.current.arms}  # their topics are not live options
        for arm in self._arms.values():
            for topic, output in ((arm.command, arm.output), (arm.gripper_topic, arm.gripper.output)):
                if topic and output in GRIPPER_ACTIONS:
                    self._goals[topic] = GripperGoals(context, wiring, arm, lambda error: self.write_failed(error))
                    self.gids[wiring.node.resolve_topic_name(topic)] = b""  # no publisher, but claimed, too
                elif topic and topic not in self._publishers:
                    publisher, gid = wiring.publisher_and_gid(message_type(output), topic, "command")
                    self._publishers[topic], self.gids[publisher.topic_name] = publisher, gid
        servo = context.options.current.topics.servo
        self._servos = {servo: Servo(context, wiring, servo)} if servo else {}
        # Velocities that move an arm, by its name, and when they expire (steady clock, s).
        self._standing: Mapping[str, tuple[Command, float]] = {}

    @property
    def subscribers(self) -> tuple[str, int]:
        """The command topic, action or service with the fewest drivers, and their number."""
        counts = {topic: publisher.get_subscription_count() for topic, publisher in self._publishers.items()}
        peers: Mapping[str, GripperGoals | Servo] = {**self._goals, **self._servos}
        counts |= {name: int(peer.is_ready) for name, peer in peers.items()}
        worst = min(counts, key=lambda topic: counts[topic])
        return worst, counts[worst]

    def prepare(self, commands: Sequence[Command]) -> Callable[[], None]:
        """Build the messages of all arms' commands; return a function that sends them.

        Call that function within ``CommandGate.sending()``: for a hold only if motion is *not* allowed, for motion
        only if it is. If the process was suspended in the meantime, it sends nothing more; nor does it after a
        message that could not be written, for which it raises WriteError.
        """
        sends: list[tuple[Command, str, Callable[[], None]]] = []
        for command in commands:
            arm, now = self._arms[command.arm], self._context.clock.ros()
            body, fingers = self._split(command)
            topics = [(arm.command, body, arm.output)]
            if fingers is not None and arm.gripper_topic in self._goals:
                # A hold sends no goal: the last goal remains in force.
                wanted = None if command.hold else fingers
                sends.append((command, arm.gripper_topic, partial(self._goals[arm.gripper_topic].want, wanted)))
            elif fingers is not None:
                topics.append((arm.gripper_topic, fingers, arm.gripper.output))
            for topic, part, output in topics:  # serialised already, so that sending takes as little as possible
                ahead = (part.stamp - now) / 1e9
                if output == "joint_trajectory" and ahead > _AHEAD:
                    self._context.throttled.log("ahead", f"{topic}: {_STARTS_NOW.format(ahead)}")
                cdr = self._serialize(to_message(part, output, self._make, now))
                sends.append((command, topic, partial(self._publishers[topic].publish, cdr)))

        def send() -> None:
            resumed, sent = self._context.suspension.resumed, dict[str, Command]()
            try:
                for command, topic, each in sends:
                    self._context.suspension.notice()
                    if self._context.suspension.resumed != resumed:
                        return
                    try:
                        each()
                    except Exception as error:  # of the middleware
                        raise WriteError(f"{topic}: {error}", frozenset(sent)) from error
                    sent[command.arm] = command
            finally:
                self._stand(sent)

        return send

    def _stand(self, sent: Mapping[str, Command]) -> None:
        """Remember when the velocities that were ``sent`` expire."""
        expires = self._context.clock.steady() + lifetime(self._context.options.current)
        others = {arm: each for arm, each in self._standing.items() if arm not in sent}
        self._standing = others | {arm: (each, expires) for arm, each in sent.items() if each.moves_on}

    def _split(self, command: Command) -> tuple[Command, Command | None]:
        arm = self._arms[command.arm]
        return split(command, arm.robot.gripper_joint_names if arm.gripper_topic else ())

    def expired(self) -> list[Command]:
        """Return zeros for the arms to which no command was sent for ``timeouts.velocity``.

        A velocity command remains in force until the next one: during a long inference it would move the arm far
        beyond the intended step. Position commands need not expire.
        """
        now = self._context.clock.steady()
        return [self._split(command)[0].stopped() for command, expires in self._standing.values() if now >= expires]


class Servo:
    """Switches MoveIt Servo, at the service ``name``, to twist commands, which it ignores until then.

    ``is_ready`` is True while Servo is available and has switched to twists.
    """

    def __init__(self, context: Context, wiring: Wiring, name: str) -> None:
        self._context, self.name, self.is_ready = context, name, False
        self._client, self._request = wiring.client(SERVO_TYPE, name), wiring.graph.service(SERVO_TYPE).Request
        self._due = 0.0  # steady clock, s
        wiring.timer(_PERIOD, self._look)

    def _look(self) -> None:
        now = self._context.clock.steady()
        if not self._client.service_is_ready():
            self.is_ready, self._due = False, 0.0
        elif not self.is_ready and now >= self._due:
            self._due = now + _RETRY
            self._client.call_async(self._request(command_type=_TWIST)).add_done_callback(self._on_answer)

    def _on_answer(self, done: Any) -> None:
        self.is_ready = bool(done.result().success)
        if self.is_ready:
            self._context.logger.info(f"{self.name}: MoveIt Servo accepts twist commands")
        else:
            self._context.throttled.log("servo", f"{self.name}: MoveIt Servo refuses twist commands")
