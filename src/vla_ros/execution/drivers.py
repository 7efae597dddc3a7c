"""The drivers of the arms and of grippers: their topics, actions and services, in this process."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from vla_ros.config.sections import GRIPPER_ACTIONS
from vla_ros.control.command import Command, message_type, split, to_message
from vla_ros.errors import WriteError
from vla_ros.execution.context import Surroundings
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


class DriverWrite(NamedTuple):
    """One message, goal or frame of a command: where it goes, and how it is made, packed and sent."""

    topic: str
    make: Callable[[], Any]
    pack: Callable[[Any], Any]
    send: Callable[[Any], object]


def as_is(what: Any) -> Any:
    return what


class Drivers:
    """Publishes commands; ``gids`` maps each resolved command topic to its publisher's id in discovery.

    ``write_failed`` is called with the error of what is sent later, a gripper's goal.
    """

    def __init__(self, context: Surroundings, wiring: Wiring, write_failed: Callable[[WriteError], object]) -> None:
        self._context = context
        self._make, self._serialize = wiring.graph.message, wiring.graph.serialize
        self._publishers: dict[str, Any] = {}
        self._goals: dict[str, GripperGoals] = {}  # by the action's name
        self.gids: dict[str, bytes] = {}
        self._arms = {arm.name: arm for arm in context.options.current.arms}  # their topics are not live options
        for arm in self._arms.values():
            for topic, output in ((arm.command, arm.output), (arm.gripper_topic, arm.gripper.output)):
                if topic and output in GRIPPER_ACTIONS:
                    self._goals[topic] = GripperGoals(context, wiring, arm, write_failed)
                    self.gids[wiring.node.resolve_topic_name(topic)] = b""  # no publisher, but claimed, too
                elif topic and topic not in self._publishers:
                    publisher, gid = wiring.publisher_and_gid(message_type(output), topic, "command")
                    self._publishers[topic], self.gids[publisher.topic_name] = publisher, gid
        servo = context.options.current.topics.servo
        self._servos = {servo: Servo(context, wiring, servo)} if servo else {}

    @property
    def subscribers(self) -> tuple[str, int]:
        """The command topic, action or service with the fewest drivers, and their number."""
        counts = {topic: publisher.get_subscription_count() for topic, publisher in self._publishers.items()}
        peers: Mapping[str, GripperGoals | Servo] = {**self._goals, **self._servos}
        counts |= {name: int(peer.is_ready) for name, peer in peers.items()}
        worst = min(counts, key=lambda topic: counts[topic])
        return worst, counts[worst]

    def writes(self, command: Command) -> list[DriverWrite]:
        """Return what an arm's command is for its drivers, to be sent within ``Safety.sending()``."""
        writes, arm, now = list[DriverWrite](), self._arms[command.arm], self._context.clock.ros()
        body, fingers = self.split(command)
        topics = [(arm.command, body, arm.output)]
        if fingers is not None and arm.gripper_topic in self._goals:
            # A hold sends no goal: the last goal remains in force.
            wanted = None if command.hold else fingers
            writes.append(
                DriverWrite(arm.gripper_topic, lambda: wanted, as_is, self._goals[arm.gripper_topic].want)
            )
        elif fingers is not None:
            topics.append((arm.gripper_topic, fingers, arm.gripper.output))
        for topic, part, output in topics:
            ahead = (part.stamp - now) / 1e9
            if output == "joint_trajectory" and ahead > _AHEAD:
                self._context.throttled.log("ahead", f"{topic}: {_STARTS_NOW.format(ahead)}")
            make = partial(to_message, part, output, self._make, now)
            writes.append(DriverWrite(topic, make, self._serialize, self._publishers[topic].publish))
        return writes

    def split(self, command: Command) -> tuple[Command, Command | None]:
        """Split a command into one for the arm and one for a gripper that has its own driver, or None."""
        arm = self._arms[command.arm]
        return split(command, arm.robot.gripper_joint_names if arm.gripper_topic else ())


class Servo:
    """Switches MoveIt Servo, at the service ``name``, to twist commands, which it ignores until then.

    ``is_ready`` is True while Servo is available and has switched to twists.
    """

    def __init__(self, context: Surroundings, wiring: Wiring, name: str) -> None:
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
