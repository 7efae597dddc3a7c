"""Switches MoveIt Servo to twist commands, which it ignores until then."""

from typing import Any

from vla_ros.graph.wiring import Wiring
from vla_ros.node.context import Context

TYPE = "moveit_msgs/srv/ServoCommandType"
_TWIST = 1  # value of the request's command_type
_PERIOD = 0.1  # s
_RETRY = 1.0  # s; after a call that was refused or not answered


class Servo:
    """Calls ``switch_command_type`` whenever the service ``name`` appears.

    ``is_ready`` is True while Servo is available and has switched to twists.
    """

    def __init__(self, context: Context, wiring: Wiring, name: str) -> None:
        self._context, self.name, self.is_ready = context, name, False
        self._client, self._request = wiring.client(TYPE, name), wiring.graph.service(TYPE).Request
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
