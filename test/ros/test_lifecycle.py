"""The managed node through its states, as a life-cycle manager and a driver see it.

Regressions pinned: commands before activation or arming, or after deactivation; a failed configure that ends in a
state from which nothing can be configured; subscriptions left behind by cleanup.
"""

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")

from lifecycle_msgs.msg import Transition

pytestmark = pytest.mark.ros


def test_through_all_states(robot, policy) -> None:
    policy("autostart:=false")
    robot.drive()
    assert robot.state() == "unconfigured"
    assert robot.node.count_subscribers("/camera/image_raw") == 0

    assert robot.change(Transition.TRANSITION_CONFIGURE)
    assert robot.state() == "inactive"
    robot.wait(lambda: robot.node.count_subscribers("/camera/image_raw"), "the subscription")
    assert not robot.actions, "an inactive node answers nothing"
    assert robot.enable() == (False, "not active: nothing can be commanded yet")

    assert robot.change(Transition.TRANSITION_ACTIVATE)
    assert robot.state() == "active"
    robot.wait(lambda: len(robot.actions) >= 3, "actions")
    assert not robot.commands, "an active node that is not armed commands nothing"

    assert robot.enable()[0]
    robot.wait(lambda: len(robot.commands) >= 5, "commands")
    message = robot.commands[-1][1]
    assert robot.is_motion(message), "a command carries the stamp of its frame"
    assert list(message.name)[:7] == [f"joint_{number}" for number in range(1, 8)]
    assert np.isfinite(message.position).all()

    assert robot.change(Transition.TRANSITION_DEACTIVATE)
    assert robot.state() == "inactive"
    told, shown = len(robot.commands), len(robot.actions)
    sent = len(robot.stamps)
    robot.wait(lambda: len(robot.stamps) > sent + 10, "ten more frames")
    assert len(robot.commands) <= told + 1, "nothing but the hold that was on its way"
    assert len(robot.actions) <= shown + 1

    assert robot.change(Transition.TRANSITION_CLEANUP)
    assert robot.state() == "unconfigured"
    robot.wait(lambda: robot.node.count_subscribers("/camera/image_raw") == 0, "the subscription's end")

    assert robot.change(Transition.TRANSITION_CONFIGURE)
    assert robot.change(Transition.TRANSITION_ACTIVATE)
    shown = len(robot.actions)
    robot.wait(lambda: len(robot.actions) > shown, "actions of the second life")
    assert robot.change(Transition.TRANSITION_ACTIVE_SHUTDOWN)
    assert robot.state() == "finalized"


def test_a_failed_transition_gives_its_reason_and_can_be_retried(robot, policy) -> None:
    from rcl_interfaces.msg import Parameter, ParameterType, ParameterValue
    from rcl_interfaces.srv import SetParameters

    node = policy("autostart:=false", "robot.urdf:=/nowhere/arm.urdf")
    assert not robot.change(Transition.TRANSITION_CONFIGURE)
    assert robot.state() == "unconfigured"
    assert "/nowhere/arm.urdf" in node.output
    assert "error state left for unconfigured; the reason was: configure: " in node.output
    value = ParameterValue(type=ParameterType.PARAMETER_STRING, string_value="demo")
    request = SetParameters.Request(parameters=[Parameter(name="robot.urdf", value=value)])
    answer = robot.call(SetParameters, "/vla_policy/set_parameters", request)
    assert answer.results[0].successful
    assert robot.change(Transition.TRANSITION_CONFIGURE)
    assert robot.state() == "inactive"


def test_an_autostarted_node_that_cannot_start_ends_with_status_1(policy) -> None:
    node = policy("robot.urdf:=/nowhere/arm.urdf")
    assert node.process.wait(60) == 1
    assert "/nowhere/arm.urdf" in node.output


def test_autostart_arms_nothing_and_armed_does(robot, policy) -> None:
    node = policy()
    robot.drive()
    robot.wait(lambda: len(robot.actions) >= 3, "actions")
    assert robot.state() == "active"
    assert not robot.commands
    node.end()
    policy("control.armed:=true")
    robot.wait(lambda: len(robot.commands) >= 3, "commands")


def test_the_node_lives_in_the_executor_of_others() -> None:
    import rclpy
    from rclpy.context import Context
    from rclpy.executors import SingleThreadedExecutor
    from rclpy.lifecycle import TransitionCallbackReturn
    from rclpy.parameter import Parameter

    from vla_ros.node.lifecycle_node import VlaPolicyNode

    context = Context()
    rclpy.init(context=context)
    values = {"autostart": False, "policy.name": "hold", "robot.urdf": "demo"}
    node = VlaPolicyNode(
        "inner", context=context, parameter_overrides=[Parameter(name, value=v) for name, v in values.items()]
    )
    executor = SingleThreadedExecutor(context=context)
    executor.add_node(node)
    try:
        assert node.config.policy.name == "hold"
        assert node.trigger_configure() == TransitionCallbackReturn.SUCCESS
        assert node.trigger_activate() == TransitionCallbackReturn.SUCCESS
        executor.spin_once(timeout_sec=0.1)
        assert node.trigger_deactivate() == TransitionCallbackReturn.SUCCESS
        assert node.trigger_cleanup() == TransitionCallbackReturn.SUCCESS
    finally:
        node.leave()
        node.destroy_node()
        executor.shutdown()
        context.try_shutdown()
