"""Where commissioning takes place: on the graph, with the node, or in a simulation, with the node's parts."""

from collections.abc import Callable
from functools import partial
from typing import Any

from vla_ros.config import CameraConfig, Config
from vla_ros.control.clock import SimulatedClock
from vla_ros.control.command import message_type
from vla_ros.graph.origin import stamp_of
from vla_ros.node.policy_node import PolicyNode
from vla_ros.node.receiver import joint_state_of
from vla_ros.node.run import serve
from vla_ros.vision.messages import IMAGE_TYPES, image_stamp
from vla_ros_lab.commission.measure import TICK
from vla_ros_lab.commission.motion import TICKS
from vla_ros_lab.commission.session import Commissioning
from vla_ros_lab.eval.graph import Driver, drivers_of
from vla_ros_lab.eval.port import SIMULATED, NodePort
from vla_ros_lab.sim.environment import Environment


def on_graph(session: Commissioning, config: Config, cameras: CameraConfig) -> int:
    """Commission the robot; return the node's exit status. ``cameras`` are only heard."""

    def ends(node: PolicyNode) -> Callable[[], bool]:
        session.safety, session.arm = node.safety, partial(node.enable, True)
        session.configure = node.reconfigure
        heard, wiring = session.heard, node.wiring

        def tap(topic: str, kind: str, hear: Callable[[Any], None]) -> None:
            cls, deserialize = wiring.graph.message(kind), wiring.graph.deserialize
            wiring.taps[wiring.node.resolve_topic_name(topic)] = lambda data, _: hear(deserialize(data, cls))

        def measured(topic: str, state: Any) -> None:
            arms, row = [arm for arm in config.arms if arm.joint_states == topic], heard.arrived(stamp_of(state))
            if any(set(arm.robot.joint_names) & set(state.name) for arm in arms):  # not another driver's fingers
                heard.times[topic].append(row)
            for arm in arms:
                heard.measure(arm.name, joint_state_of(state, 0), row)

        def commanded(arm: str, driver: Driver, sent: Any) -> None:
            heard.command(arm, driver.read(sent, 0))

        def seen(topic: str, data: Any, _: Any) -> None:
            heard.times[topic].append(heard.arrived(image_stamp(data)))

        for arm in config.arms:
            driver, *_ = drivers_of([arm])
            tap(arm.joint_states, "sensor_msgs/msg/JointState", partial(measured, arm.joint_states))
            tap(driver.topic, message_type(driver.output), partial(commanded, arm.name, driver))
        for one in cameras.each:
            wiring.subscribe_raw(IMAGE_TYPES[one.transport], one.topic, partial(seen, one.topic), "camera")
        tick = wiring.publisher(IMAGE_TYPES["raw"], TICKS, "camera")
        wiring.timer(TICK, lambda: session.step(tick.publish) if node.is_active else None)
        return lambda: session.ended

    return serve(config, source=session.source, ends=ends)


def simulated(
    session: Commissioning, config: Config, world: Environment, clock: SimulatedClock, pause: Callable[[], Any]
) -> None:
    """Commission the arms of ``world`` on a simulated clock; ``pause`` is called every tick."""
    port = NodePort(config, session.source, SIMULATED, time=clock)
    session.safety, session.arm, heard = port.node.safety, port.node.safety.arm, session.heard
    session.configure = partial(setattr, port.node.options, "current")

    def advance() -> None:
        clock.after(world.step_seconds / world.ticks, advance)
        world.step()
        measured = world.observe((), clock.ros())
        for arm, state in zip(config.arms, measured.joints, strict=True):
            heard.times[arm.joint_states].append(row := heard.arrived(state.stamp))
            heard.measure(arm.name, state, row)
        port.publish(measured, clock.ros())

    def step() -> None:
        clock.after(TICK, step)
        pause()
        session.step(partial(port.node.cameras.receive, 0))

    advance()
    step()
    while not session.ended:
        port.run_once()
        for command in port.commands:
            world.apply(command)
            heard.command(command.arm, command)
        port.forget()
