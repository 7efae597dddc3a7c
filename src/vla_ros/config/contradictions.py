"""Options that are right alone and wrong together, such as a gripper whose threshold it can never pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from vla_ros.config.options import option_of
from vla_ros.config.tree import Config


def contradictions(config: Config) -> list[str]:
    """What is wrong between options that are each right, one line each."""
    return [*_of_cameras(config), *_of_gripper(config), *_of_control(config)]


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
    feeds = [feed.partition("=") for feed in config.robot.state_topics]
    for feed, (key, _, topic) in zip(config.robot.state_topics, feeds, strict=True):
        if not key or not topic:
            yield f"robot.state_topics: found {feed!r}, expected key=/topic"
    if len({key for key, _, _ in feeds}) < len(feeds):
        yield f"robot.state_topics: found {list(config.robot.state_topics)}, expected each key once"


def _of_gripper(config: Config) -> Iterator[str]:
    gripper, fingers, topic = config.gripper, config.robot.gripper_joint_names, config.topics.gripper
    if topic and topic == config.topics.command:
        yield f"topics.gripper: found {topic}, the same as topics.command; leave it empty to send both together"
    elif topic and (gripper.mode == "none" or not fingers):
        found = "gripper.mode none" if fingers else "no robot.gripper_joint_names"
        yield f"topics.gripper: found {topic} with {found}: nothing would ever be sent there"
    if gripper.mode == "none":
        return
    if gripper.open_value == gripper.closed_value:
        yield f"gripper.open_value: found {gripper.open_value:g}, the same as gripper.closed_value"
    if fingers and gripper.open_position == gripper.closed_position:
        yield f"gripper.open_position: found {gripper.open_position:g}, the same as gripper.closed_position"
    if gripper.mode != "binary":
        return
    band = f"gripper.threshold: found {gripper.threshold:g} with gripper.hysteresis {gripper.hysteresis:g}"
    if gripper.threshold - gripper.hysteresis < 0:
        yield f"{band}: the gripper would never close; expected a band within 0 to 1"
    if gripper.threshold + gripper.hysteresis >= 1:
        yield f"{band}: the gripper would never open; expected a band within 0 to 1"


def _of_control(config: Config) -> Iterator[str]:
    control, limits, policy = config.control, config.limits, config.policy
    if len(limits.workspace_low) != len(limits.workspace_high):
        yield "limits.workspace_low and limits.workspace_high: expected both corners of the box or neither"
    elif any(low >= high for low, high in zip(limits.workspace_low, limits.workspace_high, strict=True)):
        yield (
            f"limits.workspace_low: found {list(limits.workspace_low)}, expected each below limits.workspace_high "
            f"{list(limits.workspace_high)}"
        )
    if control.output == "twist_stamped":
        if control.rate_hz == 0:
            yield "control.rate_hz: found 0 with twist_stamped; a velocity needs to know how long a step lasts"
        if config.robot.gripper_joint_names and not config.topics.gripper:
            yield (
                f"robot.gripper_joint_names: found {list(config.robot.gripper_joint_names)} with twist_stamped, "
                "which has no room for fingers; give them a topic of their own (topics.gripper), or set it to []"
            )
    if len(policy.instruction) > policy.max_instruction_length:
        yield (
            f"policy.instruction: found {len(policy.instruction)} characters, policy.max_instruction_length is "
            f"{policy.max_instruction_length}"
        )
