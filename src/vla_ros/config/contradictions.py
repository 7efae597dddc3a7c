"""Detects options that are valid alone but contradict each other, such as a gripper threshold out of reach."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from vla_ros.config.options import option_of
from vla_ros.config.sections import ARM_OUTPUTS, FEED_TYPES, GRIPPER_ACTIONS, VELOCITY_OUTPUTS
from vla_ros.config.tree import OF_AN_ARM, ArmConfig, Config


def contradictions(config: Config) -> list[str]:
    """Return the contradictions between valid options, one line each."""
    found = [*_of_cameras(config), *_of_control(config), *_between_arms(config)]
    for arm in config.arms:
        found += [*_of_gripper(config, arm), *_of_an_arm(config, arm)]
    return list(dict.fromkeys(found))  # what arms share is wrong once


def _of_cameras(config: Config) -> Iterator[str]:
    camera = config.camera
    if not camera.topics:
        yield "camera.topics: found an empty list, expected at least one image topic"
    if len(camera.keys) != len(camera.topics):
        found = f"{len(camera.keys)} names for {len(camera.topics)} camera.topics"
        yield f"camera.keys: found {found}, expected one each"
    for leaf in fields(camera):
        count = len(getattr(camera, leaf.name)) if option_of(leaf.metadata).per_camera else 1
        if count not in (1, len(camera.topics)):
            yield f"camera.{leaf.name}: found {count} values, expected one for all cameras or one for each"
    for name, values in (("camera.topics", camera.topics), ("camera.keys", camera.keys)):
        if len(set(values)) < len(values):
            yield f"{name}: found {list(values)}, expected each once"
    for text, feed in zip(config.robot.state_topics, config.robot.feeds, strict=True):
        if not feed.key or not feed.topic or feed.type not in FEED_TYPES:
            yield f"robot.state_topics: found {text!r}, expected key=/topic or key=/topic:{'|'.join(FEED_TYPES)}"
    if len({feed.key for feed in config.robot.feeds}) < len(config.robot.feeds):
        yield f"robot.state_topics: found {list(config.robot.state_topics)}, expected each key once"


def _name(config: Config, arm: ArmConfig, leaf: str) -> str:
    """Return the arm's own option, or the one that all arms share."""
    own = f"{arm.name}.{leaf}"
    return own if own in config.own else OF_AN_ARM[leaf]


def _of_gripper(config: Config, arm: ArmConfig) -> Iterator[str]:
    gripper, fingers, topic = arm.gripper, arm.robot.gripper_joint_names, arm.gripper_topic
    named = _name(config, arm, "gripper")
    if topic and topic == arm.command:
        command = _name(config, arm, "command")
        yield f"{named}: found {topic}, the same as {command}; leave it empty to send both together"
    elif topic and (gripper.mode == "none" or not fingers):
        found = "gripper.mode none" if fingers else f"no {_name(config, arm, 'gripper_joint_names')}"
        yield f"{named}: found {topic} with {found}: nothing would ever be sent there"
    if gripper.mode == "none":
        return
    if gripper.output in GRIPPER_ACTIONS and fingers and not topic:
        yield f"{named}: found no value, expected the name of the action ({gripper.output})"
    if gripper.output in GRIPPER_ACTIONS and gripper.max_speed:
        yield (
            f"gripper.max_speed: found {gripper.max_speed:g} with the action {gripper.output}; goals are final "
            "positions; set gripper.goal_speed instead"
        )
    if gripper.open_value == gripper.closed_value:
        yield f"gripper.open_value: found {gripper.open_value:g}, the same as gripper.closed_value"
    if fingers and gripper.open_position == gripper.closed_position:
        opened, closed = (_name(config, arm, leaf) for leaf in ("open_position", "closed_position"))
        yield f"{opened}: found {gripper.open_position:g}, the same as {closed}"
    if gripper.mode != "binary":
        return
    band = f"gripper.threshold: found {gripper.threshold:g} with gripper.hysteresis {gripper.hysteresis:g}"
    if gripper.threshold - gripper.hysteresis < 0:
        yield f"{band}: the gripper would never close; expected a band within 0 to 1"
    if gripper.threshold + gripper.hysteresis >= 1:
        yield f"{band}: the gripper would never open; expected a band within 0 to 1"


def _of_an_arm(config: Config, arm: ArmConfig) -> Iterator[str]:
    low, high = arm.limits.workspace_low, arm.limits.workspace_high
    names = [_name(config, arm, leaf) for leaf in ("workspace_low", "workspace_high")]
    if len(low) != len(high):
        yield f"{names[0]} and {names[1]}: expected both corners of the box or neither"
    elif any(a >= b for a, b in zip(low, high, strict=True)):
        yield f"{names[0]}: found {list(low)}, expected each below {names[1]} {list(high)}"
    fingers = arm.robot.gripper_joint_names
    joints = (*arm.robot.joint_names, *fingers)
    twice = sorted({name for name in joints if joints.count(name) > 1})
    if twice:
        names = [_name(config, arm, leaf) for leaf in ("joint_names", "gripper_joint_names")]
        yield f"{names[0]} and {names[1]}: found {', '.join(twice)} more than once, expected each joint once"
    for leaf, topic in (("command", arm.command), ("gripper", arm.gripper_topic)):
        if topic and topic == arm.joint_states:
            own = [_name(config, arm, name) for name in (leaf, "joint_states")]
            yield f"{own[0]}: found {topic}, the same as {own[1]}: commands would be taken for measurements"
    if arm.output in ARM_OUTPUTS and fingers and not arm.gripper_topic:
        named = _name(config, arm, "gripper_joint_names")
        yield (
            f"{named}: found {list(fingers)} with {arm.output}, which has no room for fingers; give "
            f"them a topic of their own ({_name(config, arm, 'gripper')}), or set it to []"
        )


def _between_arms(config: Config) -> Iterator[str]:
    for index, arm in enumerate(config.arms):
        for other in config.arms[:index]:
            for leaf, topic in (("command", arm.command), ("gripper", arm.gripper_topic)):
                if topic and topic in (other.command, other.gripper_topic):
                    yield (
                        f"{arm.name}.{leaf}: found {topic}, on which '{other.name}' is commanded, too; "
                        "give each arm a topic of its own"
                    )
            mine = {*arm.robot.joint_names, *arm.robot.gripper_joint_names}
            both = mine & {*other.robot.joint_names, *other.robot.gripper_joint_names}
            if both and arm.joint_states == other.joint_states:
                yield (
                    f"{arm.name}.joint_names: found {', '.join(sorted(both))}, which '{other.name}' has, too; "
                    f"a joint on {arm.joint_states} belongs to one arm"
                )


def _of_control(config: Config) -> Iterator[str]:
    policy = config.policy
    velocities = [arm.output for arm in config.arms if arm.output in VELOCITY_OUTPUTS]
    if config.control.rate_hz == 0 and velocities:
        yield f"control.rate_hz: found 0 with {velocities[0]}; a velocity needs to know how long a step lasts"
    if config.control.command_rate_hz and velocities:
        found = f"{config.control.command_rate_hz:g} with {velocities[0]}"
        yield f"control.command_rate_hz: found {found}; a velocity lasts until the next step, expected 0"
    if config.control.command_rate_hz and config.control.rate_hz == 0:
        found = f"{config.control.command_rate_hz:g} with control.rate_hz 0"
        yield f"control.command_rate_hz: found {found}, which does not say how long a step lasts; set rate_hz"
    if len(policy.instruction) > policy.max_instruction_length:
        yield (
            f"policy.instruction: found {len(policy.instruction)} characters, policy.max_instruction_length is "
            f"{policy.max_instruction_length}"
        )
