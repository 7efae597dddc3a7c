"""Detects options that are valid alone but contradict each other, such as a gripper threshold out of reach."""

from collections.abc import Iterator
from dataclasses import fields

from vla_ros.config.collision import FORM, SIZES
from vla_ros.config.control import ARM_OUTPUTS, VELOCITY_OUTPUTS
from vla_ros.config.options import LONGEST_INSTRUCTION, option_of
from vla_ros.config.sections import GRIPPER_ACTIONS, STATE_TOPIC_TYPES
from vla_ros.config.takeover import BUTTONS, DIRECTIONS
from vla_ros.config.tree import OF_AN_ARM, ArmConfig, Config

_CORNERS = ("workspace_low", "workspace_high")


def contradictions(config: Config, *, live: bool = False) -> list[str]:
    """Return the contradictions between valid options, one line each.

    ``live``: options change one after the other, so one corner of a workspace box is no contradiction.
    """
    found = [
        *_of_cameras(config),
        *_of_control(config),
        *_of_topics(config),
        *_of_takeover(config),
        *_of_collision(config),
        *([] if live else half_boxes(config)),
    ]
    for arm in config.arms:
        found += [*_of_gripper(config, arm), *_of_an_arm(config, arm)]
    return list(dict.fromkeys(found))  # once for an option that several arms share


def _of_cameras(config: Config) -> Iterator[str]:
    camera = config.camera
    if not camera.topics:
        yield "camera.topics: found an empty list, expected at least one image topic"
    if any(camera.info) and config.node.clock == "inputs":
        yield "camera.info: set, but with node.clock inputs there is no time to wait for transforms; send points"
    if len(camera.keys) != len(camera.topics):
        found = f"{len(camera.keys)} keys for {len(camera.topics)} camera.topics"
        yield f"camera.keys: found {found}, expected one key per topic"
    for leaf in fields(camera):
        count = len(getattr(camera, leaf.name)) if option_of(leaf.metadata).per_camera else 1
        if count not in (1, len(camera.topics)):
            yield f"camera.{leaf.name}: found {count} values, expected one for all cameras or one per camera"
    for name, values in (("camera.topics", camera.topics), ("camera.keys", camera.keys)):
        if len(set(values)) < len(values):
            yield f"{name}: found {list(values)}, expected no repeated value"
    for text, topic in zip(config.robot.state_topics, config.robot.parsed_state_topics, strict=True):
        if not topic.name or not topic.topic or topic.type not in STATE_TOPIC_TYPES:
            types = "|".join(STATE_TOPIC_TYPES)
            yield f"robot.state_topics: found {text!r}, expected NAME=/topic or NAME=/topic:{types}"
    if len({topic.name for topic in config.robot.parsed_state_topics}) < len(config.robot.parsed_state_topics):
        yield f"robot.state_topics: found {list(config.robot.state_topics)}, expected no repeated name"


def _of_control(config: Config) -> Iterator[str]:
    policy, control = config.policy, config.control
    velocities = [arm.output for arm in config.arms if arm.output in VELOCITY_OUTPUTS]
    if control.rate_hz == 0 and velocities:
        yield f"control.rate_hz: found 0 with {velocities[0]}, which needs the length of a step; set rate_hz"
    found = f"control.command_rate_hz: found {control.command_rate_hz:g} with"
    if control.command_rate_hz and velocities:
        yield f"{found} {velocities[0]}, whose velocities last until the next step; set command_rate_hz to 0"
    if control.command_rate_hz and config.node.clock == "inputs":
        yield f"{found} node.clock inputs, where no time passes between steps; set command_rate_hz to 0"
    if config.guard.process == "true" and config.node.clock == "inputs":
        yield "guard.process: found true with node.clock inputs, where time stands still; set it to false"
    if control.command_rate_hz and control.rate_hz == 0:
        yield f"{found} control.rate_hz 0, so the length of a step is unknown; set rate_hz"
    if (length := len(policy.instruction)) > LONGEST_INSTRUCTION:
        yield f"policy.instruction: found {length} characters, expected at most {LONGEST_INSTRUCTION}"


def _of_topics(config: Config) -> Iterator[str]:
    """Check that no two drivers share a topic, and that none uses a topic of measurements."""
    used = {arm.joint_states: _name(config, arm, "joint_states") for arm in config.arms}
    for arm in config.arms:
        for leaf, topic in (("command", arm.command), ("gripper", arm.gripper_topic)):
            named = f"{arm.name}.{leaf}" if config.robot.arms else OF_AN_ARM[leaf]
            if topic and used.setdefault(topic, named) != named:
                yield f"{named}: found {topic}, the same as {used[topic]}; each driver needs a separate topic"


def _of_takeover(config: Config) -> Iterator[str]:
    takeover, own = config.takeover, config.takeover.input
    buttons, reads = takeover.parsed_buttons, ("joy", "twist", "twist_stamped", "pose")
    form = {
        "joints": (len(takeover.parsed_joints), "JOINT = LEADER_JOINT [* SCALE] [+ ZERO]"),
        "buttons": (
            len(set(buttons.values())),
            f"NAME = INDEX, each of {', '.join(BUTTONS)} once, with an index of its own",
        ),
        "axes": (len(takeover.parsed_axes), f"DIRECTION = INDEX [* SCALE] of {', '.join(DIRECTIONS)}"),
    }
    for leaf, (count, expected) in form.items():
        if count != len(getattr(takeover, leaf)):
            yield f"takeover.{leaf}: found {list(getattr(takeover, leaf))}, expected {expected}"
    once = {
        "joints": [joint.name for joint in takeover.parsed_joints],
        "joints (of the leader)": [joint.leader for joint in takeover.parsed_joints],
    }
    for what, names in once.items():
        if twice := {name for name in names if names.count(name) > 1}:
            yield f"takeover.{what}: found {', '.join(sorted(twice))} twice, expected each once"
    for leaf, parts in (("joints", takeover.parsed_joints), ("axes", takeover.parsed_axes)):
        if any(part.scale == 0 for part in parts):
            yield f"takeover.{leaf}: found a scale of 0, with which nothing would move"
    if takeover.gripper and (takeover.gauge is None or takeover.gauge.closed == takeover.gauge.open):
        yield f"takeover.gripper: found {takeover.gripper!r}, expected LEADER_JOINT = CLOSED..OPEN, different ends"
    users = {
        "leader": ("leader",),
        "joints": ("leader",),
        "gripper": ("leader",),
        "topic": reads[1:],
        "axes": ("joy",),
    }
    for leaf, inputs in users.items():
        if own not in ("none", *inputs) and getattr(takeover, leaf):
            yield f"takeover.{leaf}: found a value with takeover.input {own}; only {' or '.join(inputs)} uses it"
    if own == "leader" and (
        led := [arm.name for arm in config.arms if arm.leader and arm.leader == arm.joint_states]
    ):
        yield f"takeover.leader: found the joint states of '{led[0]}' itself, expected those of the leader arm"
    if own == "leader" and not any(arm.leader for arm in config.arms):
        yield "takeover.leader: found no topic, expected the JointState of the leader arm"
    if own in reads[1:] and not takeover.topic:
        yield f"takeover.topic: found no topic, expected that of {own}"
    if own in reads and not ("deadman" in buttons and takeover.joy):
        yield f"takeover.joy and takeover.buttons: expected a Joy with a button deadman; {own} needs one"
    if own == "joy" and not takeover.axes:
        yield "takeover.axes: found none, expected the axes that move the tip, such as x = 1"
    if buttons and not takeover.joy:
        yield "takeover.joy: found no topic, expected the Joy that has takeover.buttons"
    if takeover.allow_reach and not (own == "leader" and "reach" in buttons):
        yield "takeover.allow_reach: expected takeover.input leader, and a button reach that is held meanwhile"
    if takeover.lost_distance <= takeover.tolerance:
        expected = f"expected more than takeover.tolerance, {takeover.tolerance:g}"
        yield f"takeover.lost_distance: found {takeover.lost_distance:g}, {expected}"
    if takeover.arm and takeover.arm not in config.robot.arms:
        yield f"takeover.arm: found {takeover.arm!r}, expected one of robot.arms, {list(config.robot.arms)}"
    if own != "none" and config.node.clock == "inputs":
        yield f"takeover.input: found {own} with node.clock inputs, where no person keeps pace; set it to none"


def _of_collision(config: Config) -> Iterator[str]:
    collision = config.collision
    if len(collision.parsed_obstacles) != len(collision.obstacles):
        yield f"collision.obstacles: found {list(collision.obstacles)}, expected each as {FORM}"
    names = [obstacle.name for obstacle in collision.parsed_obstacles]
    if len(set(names)) < len(names):
        yield f"collision.obstacles: found the names {names}, expected each once"
    if collision.held and collision.parsed_held is None:
        yield f"collision.held: found {collision.held!r}, expected {', '.join(SIZES)} as in obstacles"
    if collision.check and not collision.deceleration:
        yield (
            "collision.deceleration: found 0 with collision.check; set how fast the slowest joint stops, in "
            "rad/s^2 (the robot's data sheet, or measured), or set collision.check to false"
        )
    if collision.slow_distance < collision.hold_distance:
        found = f"found {collision.slow_distance:g}, expected at least collision.hold_distance"
        yield f"collision.slow_distance: {found}, {collision.hold_distance:g}"
    if collision.scene_required and not collision.scene:
        yield "collision.scene: found no topic with collision.scene_required; name the topic, or set it to false"


def _name(config: Config, arm: ArmConfig, leaf: str) -> str:
    own = f"{arm.name}.{leaf}"
    return own if own in config.own else OF_AN_ARM[leaf]


def _of_gripper(config: Config, arm: ArmConfig) -> Iterator[str]:
    gripper, fingers, topic = arm.gripper, arm.robot.gripper_joint_names, arm.gripper_topic
    named = _name(config, arm, "gripper")
    if gripper.measured_by and (gripper.gauge is None or gripper.gauge.closed == gripper.gauge.open):
        found = f"{_name(config, arm, 'measured_by')}: found {gripper.measured_by!r}"
        yield f"{found}, expected JOINT = CLOSED..OPEN with different ends, such as 'left_finger = 0.0184..0.058'"
    if topic and (gripper.mode == "none" or not fingers):
        found = "gripper.mode none" if fingers else f"no {_name(config, arm, 'gripper_joint_names')}"
        yield f"{named}: found {topic} with {found}; nothing would ever be sent to this topic"
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
    low, high = gripper.threshold - gripper.hysteresis, gripper.threshold + gripper.hysteresis
    if gripper.mode == "binary" and (low < 0 or high >= 1):
        never = "close" if low < 0 else "open"
        found = f"found {gripper.threshold:g} with gripper.hysteresis {gripper.hysteresis:g}"
        yield f"gripper.threshold: {found}: the gripper would never {never}; expected a band within 0 to 1"


def half_boxes(config: Config) -> list[str]:
    found = []
    for arm in config.arms:
        low, high = (_name(config, arm, leaf) for leaf in _CORNERS)
        if bool(arm.limits.workspace_low) != bool(arm.limits.workspace_high):
            found.append(f"{low} and {high}: expected both corners of the box or neither")
    return found


def _of_an_arm(config: Config, arm: ArmConfig) -> Iterator[str]:
    names = [_name(config, arm, leaf) for leaf in _CORNERS]
    low, high = arm.limits.box or ((), ())
    if any(a >= b for a, b in zip(low, high, strict=True)):
        yield (
            f"{names[0]}: found {list(low)}, expected each number to be below that of {names[1]}, {list(high)}; to "
            "move the box of a running node, set both in one call of set_parameters_atomically, or first one to []"
        )
    for name, corner in zip(names, (arm.limits.workspace_low, arm.limits.workspace_high), strict=True):
        if corner and not arm.robot.urdf:
            yield f"{name}: needs {_name(config, arm, 'urdf')}, which is not set: the tip's position is not known"
    fingers = arm.robot.gripper_joint_names
    joints = (*arm.robot.joint_names, *fingers)
    names = [_name(config, arm, leaf) for leaf in ("joint_names", "gripper_joint_names")]
    twice = sorted({name for name in joints if joints.count(name) > 1})
    if twice:
        yield f"{names[0]} and {names[1]}: found {', '.join(twice)} more than once, expected each joint once"
    if arm.output in ARM_OUTPUTS and fingers and not arm.gripper_topic:
        yield (
            f"{names[1]}: found {list(fingers)} with {arm.output}, which cannot carry finger positions; give the "
            f"fingers a separate topic ({_name(config, arm, 'gripper')}), or set {names[1]} to []"
        )
