"""The policy as a managed ROS 2 node; :mod:`vla_ros.node.lifecycle_main` runs it.

It adds the transitions of a managed node and ROS parameters to :class:`~vla_ros.node.policy_node.PolicyNode`. With
the parameter ``autostart`` (default) it configures and activates itself; arming stays explicit either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rcl_interfaces.msg import ParameterDescriptor, SetParametersResult
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter

from vla_ros.config import Config, build
from vla_ros.config.contradictions import half_boxes
from vla_ros.errors import VlaRosError
from vla_ros.graph.rclpy_backend import RclpyBackend
from vla_ros.node.policy_node import PolicyNode
from vla_ros.node.ros_parameters import changed, declare
from vla_ros.node.run import NODE_NAME, follow, log_progress
from vla_ros.policies.base import Progress

SUCCESS = TransitionCallbackReturn.SUCCESS
_ERROR = TransitionCallbackReturn.ERROR


class VlaPolicyNode(LifecycleNode):  # type: ignore[misc]
    """A managed node that runs a policy, in any single-threaded executor.

    ``interrupted`` is called between loading steps; if it returns True, loading ends with KeyboardInterrupt.
    ``options`` are further arguments of ``rclpy.node.Node`` (``context``, ``namespace``,
    ``parameter_overrides``). ``config`` has the options in force; ``failure`` is why the last transition failed,
    or "". Raises ConfigError if a parameter has an unknown name or an invalid value.
    """

    def __init__(
        self, node_name: str = NODE_NAME, *, interrupted: Callable[[], bool] = lambda: False, **options: Any
    ) -> None:
        super().__init__(node_name, **options)
        self.interrupted = interrupted
        self.failure = ""
        self._start_failed = False
        self._policy_node: PolicyNode | None = None
        about = ParameterDescriptor(description="Configure and activate at start; arming stays explicit")
        autostart = self.declare_parameter("autostart", True, about).value
        self.config = declare(self)
        # Iron and later also report accepted changes; Humble only asks beforehand.
        self._asks_only = not hasattr(self, "add_post_set_parameters_callback")
        self.add_on_set_parameters_callback(self._on_set_parameters)
        if not self._asks_only:
            self.add_post_set_parameters_callback(self._on_parameters_set)
        if autostart:
            self._starter = self.create_timer(0.0, self._autostart)

    @property
    def exit_status(self) -> int | None:
        """The process's exit status, or None to continue.

        An autostarted node exits if it cannot start, because nobody would retry. Every node exits if new processes
        cannot reach it. A finalized node stays until its process is ended.
        """
        lost = self._policy_node is not None and self._policy_node.lost
        return 1 if self._start_failed or lost else None

    @property
    def is_active(self) -> bool:
        """True while the node can be armed."""
        return self._policy_node is not None and self._policy_node.is_active

    def follow(self, requests: Sequence[str], *, ready: bool) -> list[str]:
        """Carry out requests that came as signals (:func:`vla_ros.node.run.follow`)."""
        if requests and self._policy_node is None:
            return [f"void, because the node is not configured: {', '.join(requests)}"]
        return [] if self._policy_node is None else follow(requests, self._policy_node, ready=ready)

    def fail(self, error: BaseException) -> None:
        """Stop the arm: a callback, or the thread that spins, has failed."""
        if self._policy_node is not None:
            self._policy_node.fail("a callback", error)

    # Transitions

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Load and warm up the model, and create the endpoints; takes as long as the checkpoint needs."""
        node = PolicyNode(RclpyBackend(), self, self.config)
        try:
            build({}, self.config)  # options that were set one at a time are complete now
            node.configure(self._progress())
        except Exception as error:  # a third party's policy may raise anything
            return self._failed("configure", error)
        self._policy_node = node
        return SUCCESS

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Start using frames; the arm moves after ``~/enable``, or at once with ``control.armed``."""
        try:
            self._running.activate()
        except Exception as error:
            return self._failed("activate", error)
        return SUCCESS

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        if not self._running.deactivate():
            return self._failed("deactivate", VlaRosError("the policy did not end within timeouts.inference + 1 s"))
        return SUCCESS

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Destroy the endpoints, and free the model's memory; also at shutdown, from any state."""
        self.leave()
        return SUCCESS

    on_shutdown = on_cleanup

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Undo partial work, so that the node can be configured again once the cause is fixed."""
        self.leave()
        self.get_logger().error(f"error state left for unconfigured; the reason was: {self.failure}")
        return SUCCESS

    def leave(self) -> None:
        """Hold, destroy the endpoints and free the model. Safe in every state and bounded in time."""
        node, self._policy_node = self._policy_node, None
        if node is not None:
            node.cleanup()

    @property
    def _running(self) -> PolicyNode:
        assert self._policy_node is not None, "the state machine configures first"
        return self._policy_node

    def _failed(self, transition: str, error: Exception) -> TransitionCallbackReturn:
        name = "" if isinstance(error, VlaRosError) else f"{type(error).__name__}: "
        self.failure = f"{transition}: {name}{error}"
        self.get_logger().error(self.failure)
        return _ERROR

    def _autostart(self) -> None:
        self._starter.cancel()
        if self.trigger_configure() != SUCCESS or self.trigger_activate() != SUCCESS:
            self._start_failed = True

    def _progress(self) -> Progress:
        log = log_progress(self.get_logger())

        def progress(fraction: float, message: str) -> None:
            if self.interrupted():
                raise KeyboardInterrupt
            log(fraction, message)

        return progress

    # Parameters

    def _on_set_parameters(self, parameters: Sequence[Parameter]) -> SetParametersResult:
        try:
            config = changed(self.config, parameters, everything=self._policy_node is None)
        except VlaRosError as error:
            return SetParametersResult(successful=False, reason=str(error))
        if self._asks_only:
            self._apply(config)
        return SetParametersResult(successful=True)

    def _on_parameters_set(self, parameters: Sequence[Parameter]) -> None:
        self._apply(changed(self.config, parameters, everything=True))

    def _apply(self, config: Config) -> None:
        before, self.config = half_boxes(self.config), config
        for text in set(half_boxes(config)) - set(before):  # rclpy passes on no reason with a success
            self.get_logger().warning(f"{text}; there is no box now")
        if self._policy_node is not None:
            self._policy_node.reconfigure(config)
