"""Steps the node in lockstep with a simulation that waits for its commands (``node.clock: inputs``).

The simulation publishes all inputs of a step with one stamp. They are held back until the last one has arrived;
then the control loop runs on the graph thread until nothing is due at that time. So commands depend neither on the
speed of the machine nor on the order in which messages arrive.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vla_ros.config import Config
from vla_ros.control.clock import SimulatedClock
from vla_ros.errors import ImageError, VlaRosError
from vla_ros.graph.node import Backend, Node, RawSubscription
from vla_ros.graph.origin import Origin
from vla_ros.graph.wiring import Wiring
from vla_ros.vision.messages import image_stamp

_MOMENT = 1_000_000  # ns; what is due at a stamp may be due this much later, because times are rounded
_MOST = 100_000  # iterations for one stamp; a second at 250 Hz takes a thousand
_RESET = 1_000_000_000  # ns; a simulation that leaves out more time has reset its world


def run_due(clock: SimulatedClock, run_once: Callable[[], object]) -> None:
    """Run a control loop until nothing more is due at the time at which its ``clock`` stands."""
    clock.limit = clock.ros() + _MOMENT
    for _ in range(_MOST):
        if clock.ros() >= clock.limit:
            return
        run_once()
    raise VlaRosError(f"a step of the simulation did not end within {_MOST} iterations of the control loop")


class _Input:
    """The messages of one topic with its newest stamp, of which each step has ``expected``."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self.stamp = 0
        self.newest: list[Callable[[], None]] = []

    @property
    def complete(self) -> bool:
        return len(self.newest) >= self._expected

    def add(self, stamp: int, deliver: Callable[[], None]) -> None:
        if stamp != self.stamp:
            self.stamp, self.newest = stamp, []
        self.newest.append(deliver)


class LockstepWiring(Wiring):
    """Delivers the inputs of a step together, and runs the loop on :attr:`clock`. Used from the graph thread.

    The inputs are the subscriptions that tell a message's origin: images, joint states and state topics, except
    those whose messages (of ``std_msgs``) have no stamp.

    Attributes:
        clock: The time of the newest step; it stands still until the next one.
    """

    def __init__(self, graph: Backend, node: Node, config: Config) -> None:
        super().__init__(graph, node)
        self.clock = SimulatedClock()
        self._messages = Counter(arm.joint_states for arm in config.arms)  # drivers may share a topic
        self._inputs: list[_Input] = []
        self._run_once: Callable[[], object] | None = None
        self._supervise: Callable[[], None] = lambda: None
        self._reset: Sequence[Callable[[], None]] = ()

    def begin(
        self, run_once: Callable[[], object], supervise: Callable[[], None], reset: Sequence[Callable[[], None]]
    ) -> None:
        """Step a control loop's ``run_once``; those of ``reset`` are called when the world was reset."""
        self._run_once, self._supervise, self._reset = run_once, supervise, reset

    def end(self) -> None:
        """Ignore all further inputs."""
        self._run_once = None

    def subscribe_raw(
        self, type_name: str, topic: str, callback: Callable[[Any, Origin], None], qos: str
    ) -> RawSubscription:
        """Call ``callback`` with each message's CDR bytes and its origin when the message's step is complete."""
        if type_name.startswith("std_msgs/"):
            return super().subscribe_raw(type_name, topic, callback, qos)
        waiting = _Input(self._messages[topic] or 1)
        self._inputs.append(waiting)

        def on_cdr(cdr: Any, origin: Origin) -> None:
            try:
                waiting.add(image_stamp(cdr), partial(callback, cdr, origin))
            except ImageError:  # whoever decodes it reports what is wrong
                callback(cdr, origin)
                return
            stamps = {each.stamp for each in self._inputs}
            if (
                len(stamps) == 1
                and all(each.complete for each in self._inputs)
                and waiting.stamp > self.clock.ros()
            ):
                self._step(waiting.stamp)

        return super().subscribe_raw(type_name, topic, on_cdr, qos)

    def _step(self, stamp: int) -> None:
        """Deliver the inputs of ``stamp``, nanoseconds, and send every command that is due."""
        if self._run_once is None:
            return
        if self.clock.jump(stamp) > _RESET:
            for reset in self._reset:
                reset()
        for each in self._inputs:
            for deliver in each.newest:
                deliver()
        self._supervise()
        run_due(self.clock, self._run_once)
