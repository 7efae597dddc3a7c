"""Write the configuration of a new arm from its URDF and, if its driver runs, from the topics on the graph.

Every guess is a comment in the file. Units are never guessed. What cannot be told is asked on a terminal; in a
script the command refuses and names the candidates and the option that selects one.

  vla-ros init my_robot.urdf --output my_robot.yaml
  vla-ros run --config my_robot.yaml --dry-run
"""

import argparse
import re
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_ros.config.control import ARM_OUTPUTS, OUTPUTS
from vla_ros.config.files import dump_yaml, parameter_file
from vla_ros.errors import ConfigError, MissingDependencyError
from vla_ros.files import check_output, save_text
from vla_ros.kinematics.urdf import Urdf, UrdfJoint, read_urdf

_FINGER = re.compile(
    r"finger|grip|jaw|knuckle|claw|thumb|drive_joint|(?:^|_)(?:hand|index|middle|ring|little|pinky)_", re.IGNORECASE
)
_TIPS = ("grasp", "tcp", "gripper_frame", "ee_gripper", "tool0", "end_effector", "tool", "ee", "flange", "hand")
_BASES = ("base_link", "link_base", "link0", "link_0", "base")
_SIDES = re.compile(r"(?:^|_)(left|right|l|r|L|R)(?=_|$)|^(Left|Right|LEFT|RIGHT)(?=[A-Z_])")
_ARM = 4  # joints; a chain with fewer is a head, a torso or a wheel if another has as many
_DEGREES = 57.29578
_SETTLE, _MESSAGE = 3.0, 2.0  # s to look for topics; s to wait for a message
_STATES, _IMAGE = "sensor_msgs/msg/JointState", "sensor_msgs/msg/Image"
_COMMANDS = {
    "trajectory_msgs/msg/JointTrajectory": ("joint_trajectory",),
    "std_msgs/msg/Float64MultiArray": ("float64_multi_array", "joint_velocity"),
    _STATES: ("joint_state", "joint_velocity_state"),
    "geometry_msgs/msg/TwistStamped": ("twist_stamped",),
    "interbotix_xs_msgs/msg/JointGroupCommand": ("joint_group_command",),
}
"""What a subscriber's message type may mean; with two, only a person knows the unit."""


@dataclass(frozen=True)
class FoundArm:
    """An arm of a URDF; ``name`` is "arm" if there is only one."""

    name: str
    joints: tuple[str, ...]
    base: str
    tip: str
    fingers: tuple[UrdfJoint, ...]
    guesses: Mapping[str, str]  # by option, why it has its value


@dataclass(frozen=True)
class Seen:
    """What is on the graph."""

    states: Mapping[str, Mapping[str, float]]  # by topic of joint states, the newest position of each joint
    commands: Mapping[str, str]  # by topic that somebody subscribes to, the message type
    cameras: Mapping[str, tuple[int, int]]  # by topic, width and height; zeros if no image came


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("urdf", type=Path, metavar="FILE.urdf", help="the robot's description")
    add("--output", type=Path, required=True, metavar="FILE.yaml", help="the configuration to write")
    add("--tip", default="", metavar="LINK", help="the link that the policy moves (robot.tip_frame)")
    add("--command", default="", metavar="TOPIC", help="the controller's topic (topics.command)")
    add("--control-output", default="", choices=("", *OUTPUTS), help="what the controller takes (control.output)")
    add("--backend", choices=("auto", "rclpy", "dds", "none"), default="auto", help="none: look at no graph")


def run(arguments: argparse.Namespace) -> int:
    check_output("--output", arguments.output)
    urdf = read_urdf(str(arguments.urdf))
    arms = find_arms(urdf, arguments.tip)
    seen = look(arguments.backend)
    text = write(urdf, arms, seen, arguments)
    save_text(arguments.output, text)
    print(f"{arguments.output}: {text.count('# GUESS')} guesses to check, each with a comment; then:")
    print(f"  vla-ros run --config {arguments.output} --dry-run")
    print(f"  vla-ros commission --config {arguments.output}")
    return 0


def choose_one(option: str, what: str, candidates: Collection[str]) -> str:
    """Return the candidate that a person chooses on a terminal; raises ConfigError where nobody can."""
    listed = [*candidates]
    if not sys.stdin.isatty():
        raise ConfigError(f"{option}: {what}; expected one of {', '.join(listed)}")
    print(f"{what}:")
    for number, each in enumerate(listed, 1):
        print(f"  {number}  {each}")
    while True:
        answer = input(f"{option} [1-{len(listed)}]: ").strip()
        if answer in listed:
            return answer
        if answer.isdecimal() and 1 <= int(answer) <= len(listed):
            return listed[int(answer) - 1]


# The URDF


def find_arms(urdf: Urdf, tip: str = "") -> tuple[FoundArm, ...]:
    """Return the arms of a URDF; ``tip`` selects one. Raises ConfigError with the candidates if that is unclear."""
    if tip and tip not in urdf.links:
        raise ConfigError(
            f"--tip: found '{tip}', which {urdf.path} does not have; expected one of {_some(urdf.links)}"
        )
    chains = _chains(urdf)
    if tip:
        above = [joint.name for joint in urdf.chain(urdf.root, tip)]
        chains = [chain for chain in chains if chain[-1].name in above]
    if not chains:
        raise ConfigError(f"{urdf.path}: found no joint that can move above {tip or 'a gripper'}, expected an arm")
    if len(chains) == 1:
        return (_arm(urdf, "arm", chains[0], tip),)
    named = {side: chain for chain in chains if (side := _side(chain))}
    if len(named) == len(chains) == 2:
        return tuple(_arm(urdf, name, chain, "") for name, chain in sorted(named.items()))
    ends = {chain[-1].child: chain for chain in chains}
    end = choose_one("--tip", f"{urdf.path} has {len(chains)} chains of joints, which is the arm", ends)
    return (_arm(urdf, "arm", ends[end], ""),)


def _chains(urdf: Urdf) -> list[list[UrdfJoint]]:
    """Return the longest chains of joints that move by themselves and are no fingers, without what they share."""
    moving = [joint for joint in urdf.joints if joint.is_movable and joint.mimic is None]
    names = {joint.name for joint in moving}
    arms = [joint for joint in moving if not _is_finger(urdf, joint)]
    ends = [joint for joint in arms if not {each.name for each in arms} & {*urdf.movable_below(joint.child)}]
    found = [
        [each for each in urdf.chain(urdf.root, end.child) if each.name in names and not _is_finger(urdf, each)]
        for end in ends
    ]
    shared = [{each.name for each in chain} for chain in found]
    own = [[each for each in chain if sum(each.name in other for other in shared) == 1] or chain for chain in found]
    long = [chain for chain in own if len(chain) >= _ARM]
    return long or ([max(found, key=len)] if found else [])


def _is_finger(urdf: Urdf, joint: UrdfJoint) -> bool:
    """Return True for a joint of a gripper: named like one, or the last that moves, with a finger as its child."""
    below = [urdf.joint(name) for name in urdf.movable_below(joint.child)]
    moving = [each for each in below if each is not None and each.mimic is None and not _FINGER.search(each.name)]
    return not moving and bool(
        _FINGER.search(joint.name)
        or (_FINGER.search(joint.child) and not any(each and each.mimic is None for each in below))
    )


def _side(chain: Sequence[UrdfJoint]) -> str:
    found = [_SIDES.search(text) for joint in chain for text in (joint.name, joint.child)]
    sides = {"left" if (match[1] or match[2])[0] in "lL" else "right" for match in found if match}
    return sides.pop() if len(sides) == 1 else ""


def _arm(urdf: Urdf, name: str, chain: Sequence[UrdfJoint], tip: str) -> FoundArm:
    guesses = dict[str, str]()
    fixed = _fixed_to(urdf, chain[-1].child)
    if not tip:
        tip = _preferred(fixed, _TIPS) or fixed[-1]
        others = [link for link in fixed if link != tip]
        guesses["tip_frame"] = f"of {_some([tip, *others])}" if others else ""
    start = chain[0].parent
    above = [urdf.root, *(joint.child for joint in urdf.chain(urdf.root, start))]
    rigid = [link for link in above if not any(each.is_movable for each in urdf.chain(link, start))]
    base = _preferred(rigid, _BASES) or rigid[-1]
    if len(rigid) > 1:
        guesses["base_frame"] = f"of {_some(rigid)}"
    below = [urdf.joint(each) for each in urdf.movable_below(chain[-1].child)]
    fingers = [joint for joint in below if joint is not None and joint.mimic is None]
    return FoundArm(name, tuple(joint.name for joint in chain), base, tip, tuple(fingers), guesses)


def _fixed_to(urdf: Urdf, link: str) -> list[str]:
    """Return ``link`` and the links below it that do not move against it, in the order of the file."""
    links = [link]
    for current in links:  # ``links`` grows during the loop
        links += [joint.child for joint in urdf.joints if joint.parent == current and not joint.is_movable]
    return links


def _preferred(links: Sequence[str], words: Sequence[str]) -> str:
    """Return the link that has the first of ``words`` in its name, as a whole word if one has; or ""."""
    for word in words:
        parts = [link for link in links if re.search(rf"(^|[_-]){word}($|[_-])", link, re.IGNORECASE)]
        if parts:
            return parts[-1]
    return ""


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


# The graph


def look(backend: str) -> Seen:
    """Return what the graph shows within a few seconds; nothing where there is no graph."""
    from vla_ros.graph import open_graph
    from vla_ros.graph.wiring import Wiring
    from vla_ros.vision.messages import image_header

    states, sizes = dict[str, dict[str, float]](), dict[str, tuple[int, int]]()
    if backend == "none":
        return Seen({}, {}, {})
    try:
        graph = open_graph(backend, log_level="error")
    except MissingDependencyError as error:
        print(f"no graph: {error}", file=sys.stderr)
        return Seen({}, {}, {})
    with graph:
        node = graph.create_node("vla_init")
        _spin(graph, _SETTLE)
        kinds = {topic: kind for topic, [kind, *_] in node.get_topic_names_and_types()}
        commands = {
            topic: kind for topic, kind in kinds.items() if kind in _COMMANDS and node.count_subscribers(topic)
        }
        published = {topic: kind for topic, kind in kinds.items() if node.count_publishers(topic)}
        wiring = Wiring(graph, node)
        for topic, kind in published.items():
            if kind == _STATES:

                def hear(message: Any, topic: str = topic) -> None:
                    states.setdefault(topic, {}).update(
                        zip(message.name, map(float, message.position), strict=False)
                    )

                wiring.subscribe(kind, topic, hear, "joint_states")
            elif kind == _IMAGE and not re.search(r"depth|infra|mask|debug", topic):
                sizes[topic] = (0, 0)

                def see(data: Any, _: Any, topic: str = topic) -> None:
                    header = image_header(data)
                    sizes[topic] = header.width, header.height

                wiring.subscribe_raw(kind, topic, see, "camera")
        _spin(graph, _MESSAGE)
        wiring.close()
    commands = {topic: kind for topic, kind in commands.items() if topic not in states}
    return Seen(states, commands, sizes)


def _spin(graph: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    graph.spin(lambda: time.monotonic() >= end, 0.05)


# The file


def write(urdf: Urdf, arms: Sequence[FoundArm], seen: Seen, arguments: argparse.Namespace) -> str:
    """Return the configuration; raises ConfigError where a unit or a topic is unclear and nobody can be asked."""
    robot, several = list[str](), len(arms) > 1
    sections = {"policy": ["name: hold  # moves nothing; your checkpoint comes in a file of its own"]}
    if seen.cameras:
        sections["camera"] = _cameras(seen.cameras)
    robot.append(f"urdf: {dump_yaml(str(urdf.path.resolve()))}")
    if several:
        robot.append(f"arms: {dump_yaml([arm.name for arm in arms])}  # GUESS: by the names of their joints")
    sections["robot"] = robot
    taken = set[str]()
    for arm in arms:
        lines = [
            *_guess("base_frame", arm.base, arm),
            *_guess("tip_frame", arm.tip, arm),
            f"joint_names: {dump_yaml([*arm.joints])}",
            "# GUESS: the order of the URDF; an array has no names, so compare it with the controller's joints",
        ]
        if fingers := _fingers(urdf, arm):
            names = [joint.name for joint in fingers]
            lines.append(f"gripper_joint_names: {dump_yaml(names)}  # GUESS: by their names and place")
        topics = _topics(urdf, arm, seen, arguments, taken, several=several)
        ends = _ends(urdf, fingers[0]) if fingers else []
        if several:
            sections[arm.name] = lines + topics + ends
            continue
        robot += lines
        sections["control"] = [line for line in topics if line.startswith(("output", "rate"))]
        sections["topics"] = [line for line in topics if not line.startswith(("output", "rate"))]
        if ends:
            sections["gripper"] = ends
    if not any(_fingers(urdf, arm) for arm in arms):
        sections["gripper"] = ["mode: none  # the URDF has no joint of a gripper that can be commanded"]
    sections["limits"] = [
        "max_joint_step: 0.05  # rad or m; start small",
        "velocity_scale: 0.3  # of the URDF's velocity limits",
        "joint_margin: 0.05  # rad or m from the URDF's limits",
        "# following_error, collision.deceleration and the timeouts: vla-ros commission measures them",
    ]
    return parameter_file([f"{urdf.path.name}, written by vla-ros init. Check every GUESS."], sections)


def _guess(option: str, value: str, arm: FoundArm) -> list[str]:
    why = arm.guesses.get(option)
    return [f"{option}: {dump_yaml(value)}" + (f"  # GUESS: {why}" if why else "")]


def _cameras(cameras: Mapping[str, tuple[int, int]]) -> list[str]:
    keys = [
        "_".join(part for part in topic.split("/") if part and not part.startswith("image")) for topic in cameras
    ]
    keys = [key or f"camera_{index}" for index, key in enumerate(keys)]
    lines = [
        f"topics: {dump_yaml([*cameras])}  # GUESS: all on the graph; remove what is not seen",
        f"keys: {dump_yaml(keys)}  # GUESS: by the topics; the policy's own names come with it",
    ]
    if all(width for width, _ in cameras.values()):
        lines += [f"width: {dump_yaml([width for width, _ in cameras.values()])}"]
        lines += [f"height: {dump_yaml([height for _, height in cameras.values()])}"]
    return lines


def _fingers(urdf: Urdf, arm: FoundArm) -> list[UrdfJoint]:
    """Return the fingers that have the range of the first one that has limits: all get the same position."""
    ranged = [joint for joint in arm.fingers if urdf.limits(joint.name)[0] < urdf.limits(joint.name)[1]]
    bounded = [joint for joint in ranged if joint.kind != "continuous"]
    return [joint for joint in bounded if urdf.limits(joint.name)[:2] == urdf.limits(bounded[0].name)[:2]]


def _ends(urdf: Urdf, finger: UrdfJoint) -> list[str]:
    low, high, _ = urdf.limits(finger.name)
    slides = finger.kind == "prismatic"
    opened, closed = (high, low) if slides == (abs(high) >= abs(low)) else (low, high)
    why = f"# GUESS: the limits of {finger.name} in the URDF; exchange the two if it opens when told to close"
    return [why, f"open_position: {dump_yaml(opened)}", f"closed_position: {dump_yaml(closed)}"]


def _topics(
    urdf: Urdf, arm: FoundArm, seen: Seen, arguments: argparse.Namespace, taken: set[str], *, several: bool
) -> list[str]:
    """Return the lines with the arm's topics and ``control.output``."""
    lines = list[str]()
    states = [topic for topic, at in seen.states.items() if {*arm.joints} <= at.keys()]
    for topic in states[:1]:
        _check_units(urdf, arm, topic, seen.states[topic])
        lines.append(f"joint_states: {dump_yaml(topic)}")
    if seen.states and not states:
        raise ConfigError(
            f"topics.joint_states: none of {', '.join(seen.states)} has the joints {', '.join(arm.joints)}; is it "
            "the URDF of this robot, without another prefix?"
        )
    command, kind = arguments.command, arguments.control_output
    candidates = {topic: each for topic, each in seen.commands.items() if topic not in taken}
    sided = {topic: each for topic, each in candidates.items() if several and arm.name in topic}
    if not command and (sided or candidates):
        possible = sided or candidates
        named = [*possible]
        command = named[0] if len(named) == 1 else choose_one("--command", f"which topic moves {arm.name}", named)
    if not command:
        command = f"/{arm.name}/joint_command"
        lines.append(
            "# GUESS: nothing on the graph takes commands; set it and control.output (docs/robots/new-robot.md)"
        )
        return [*lines, f"command: {command}"]
    taken.add(command)
    means = [kind] if kind else [*_COMMANDS.get(seen.commands.get(command, ""), ())]
    if len(means) != 1:
        what = f"{command} takes {seen.commands.get(command, 'a type that the graph does not show')}"
        kind = choose_one("--control-output", f"{what}, whose unit is not in the message", means or OUTPUTS)
        means = [kind]
    lines.append(f"command: {dump_yaml(command)}")
    if arm.fingers and means[0] in ARM_OUTPUTS:
        lines.append("# The command carries no fingers: set topics.gripper and gripper.output")
    rate = 10.0 if means[0] == "joint_trajectory" else 50.0
    return [
        *lines,
        f"output: {means[0]}",
        *([] if several else [f"rate_hz: {rate:g}  # GUESS: what such a driver takes"]),
    ]


def _check_units(urdf: Urdf, arm: FoundArm, topic: str, at: Mapping[str, float]) -> None:
    """Raise ConfigError if joints are where the URDF does not let them be: units are not guessed."""
    for name in arm.joints:
        low, high, _ = urdf.limits(name)
        if low < high and not low - 0.1 <= at[name] <= high + 0.1:
            fits = low - 0.1 <= at[name] / _DEGREES <= high + 0.1
            hint = f" ({at[name] / _DEGREES:.3f} if that is in degrees)" if fits else ""
            raise ConfigError(
                f"{topic}: {name} is at {at[name]:.3f}{hint}, the URDF allows {low:g} to {high:g} rad or m; the "
                "driver must publish radians and metres"
            )
