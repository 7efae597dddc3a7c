"""Roles of a bag's topics: found by type and name; where several fit, a person is asked or the bag is refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from vla_ros.config import Config
from vla_ros.replay.records import BagError

IMAGE_TYPES = {"sensor_msgs/msg/Image": "raw", "sensor_msgs/msg/CompressedImage": "compressed"}
JOINTS = "sensor_msgs/msg/JointState"
TEXT = "std_msgs/msg/String"
ARRAY = "std_msgs/msg/Float64MultiArray"
TRAJECTORY = "trajectory_msgs/msg/JointTrajectory"
TWIST = "geometry_msgs/msg/TwistStamped"
COMMAND_TYPES = (JOINTS, TRAJECTORY, TWIST, ARRAY)

NODE = "vla_policy"
"""Name of the live node, for which ``~`` stands in topic names."""

ROLES = ("camera", "joint_states", "instruction", "truth")

Ask = Callable[[str, Sequence[str]], str]
"""Asks a person: takes the question and the candidates, returns the answer."""


@dataclass(frozen=True)
class Selection:
    """Topics by role.

    Attributes:
        cameras: One topic per camera of the policy, in the order of ``camera.topics``.
        transport: ``raw`` or ``compressed``; the same for all cameras.
        joint_states: Topic of measured joint states, or None.
        instruction: Topic of the instruction, or None.
        truth: Topic of the recorded commands or actions; None if there is none or joint states are differenced.
        truth_type: Its type; JointState with ``truth`` None means differencing; "" means nothing is recorded.
        state: Feed name to topic (``robot.state_topics``).
    """

    cameras: tuple[str, ...]
    transport: str
    joint_states: str | None
    instruction: str | None
    truth: str | None
    truth_type: str
    state: tuple[tuple[str, str], ...] = ()

    @property
    def truth_name(self) -> str:
        """Source of the recorded actions, for people."""
        if self.truth:
            return f"{self.truth} ({self.truth_type})"
        return f"{self.joint_states}, differenced" if self.truth_type else "none"


def expand(name: str) -> str:
    """A topic name as the live node would resolve it."""
    if name.startswith("~"):
        return f"/{NODE}{name[1:]}"
    return name if name.startswith("/") else f"/{name}"


def parse_overrides(texts: Sequence[str]) -> dict[str, str]:
    """Parses ``role=/topic`` pairs of ``--topics``; several cameras are separated by commas.

    Raises:
        BagError: Not of that form, or no such role.
    """
    found: dict[str, str] = {}
    for text in texts:
        role, separator, topic = text.partition("=")
        if not separator or role not in ROLES:
            raise BagError(f"--topics {text}: expected role=/topic with a role of {', '.join(ROLES)}")
        found[role] = topic
    return found


def select(
    topics: Mapping[str, str],
    config: Config,
    overrides: Mapping[str, str],
    ask: Ask | None = None,
    empty: Collection[str] = (),
) -> Selection:
    """Finds a topic for every role.

    Args:
        topics: Name to type of the bag's topics.
        config: The node's options; their names win if the bag has them.
        overrides: Role to topic, from ``--topics``.
        ask: Asks a person if several topics fit; None refuses.
        empty: Topics without a message; ignored unless ``overrides`` names them.

    Raises:
        BagError: There is no camera, a named topic is missing or of a wrong type, or several topics fit and
            ``ask`` is None; the candidates are listed.
    """
    named = {name for names in overrides.values() for name in names.split(",")}
    by_name = {name: kind for name, kind in topics.items() if name not in empty or name in named}
    cameras = _cameras(by_name, config, overrides.get("camera", ""), ask)
    transports = {IMAGE_TYPES[by_name[name]] for name in cameras}
    if len(transports) > 1:
        raise BagError(f"the cameras {list(cameras)} are raw and compressed; name topics of one kind with --topics")
    truth, truth_type = _truth(by_name, config, overrides.get("truth"))
    joints = _joint_states(by_name, config, overrides.get("joint_states"), truth, ask)
    if truth_type == JOINTS and truth is None and joints is None:
        truth_type = ""
    feeds = tuple((key, topic) for key, _, topic in (feed.partition("=") for feed in config.robot.state_topics))
    return Selection(
        cameras,
        transports.pop(),
        joints,
        _instruction(by_name, config, overrides.get("instruction"), ask),
        truth,
        truth_type,
        tuple((key, expand(topic)) for key, topic in feeds if expand(topic) in by_name),
    )


def _named(by_name: Mapping[str, str], name: str, role: str, types: Sequence[str]) -> str:
    """A topic that a person named."""
    if name not in by_name:
        raise BagError(f"--topics {role}={name}: the bag has no such topic; it has {', '.join(sorted(by_name))}")
    if by_name[name] not in types:
        raise BagError(f"--topics {role}={name}: is a {by_name[name]}, expected {' or '.join(types)}")
    return name


def _optional(
    by_name: Mapping[str, str],
    role: str,
    named: str | None,
    kind: str,
    usual: str,
    candidates: Sequence[str],
    ask: Ask | None,
) -> str | None:
    """An optional topic: the one that was named, the usual one, or one of the candidates."""
    if named is not None:
        return None if named in ("", "none") else _named(by_name, named, role, (kind,))
    if by_name.get(usual) == kind:
        return usual
    return _choose(role, candidates, ask) if candidates else None


def _choose(role: str, candidates: Sequence[str], ask: Ask | None) -> str:
    """The only candidate, or the one that a person chooses."""
    if len(candidates) == 1:
        return candidates[0]
    if ask is None:
        listed = "\n".join(f"  --topics {role}={name}" for name in candidates)
        raise BagError(f"several topics could be the {role.replace('_', ' ')}; name one:\n{listed}")
    return ask(f"Which topic is the {role.replace('_', ' ')}?", candidates)


def _cameras(by_name: Mapping[str, str], config: Config, named: str, ask: Ask | None) -> tuple[str, ...]:
    wanted = len(config.camera.topics)
    if named:
        cameras = tuple(_named(by_name, name.strip(), "camera", tuple(IMAGE_TYPES)) for name in named.split(","))
        if len(cameras) != wanted:
            raise BagError(f"--topics camera: found {len(cameras)} topics, expected {wanted}, as camera.topics has")
        return cameras
    candidates = [name for name, kind in by_name.items() if kind in IMAGE_TYPES and "depth" not in name.lower()]
    if not candidates:
        found = ", ".join(f"{name} ({kind})" for name, kind in sorted(by_name.items())) or "no topics"
        raise BagError(f"the bag has no sensor_msgs/Image or CompressedImage; it has {found}")
    chosen = []
    for name in map(expand, config.camera.topics):
        variants = (name, f"{name}/compressed", name.removesuffix("/compressed"))
        chosen += [variant for variant in variants if variant in candidates][:1]
    if len(chosen) == wanted:
        return tuple(chosen)
    if wanted > 1:
        raise BagError(
            f"camera.topics: found {list(config.camera.topics)}, the bag has {candidates}; name {wanted} of "
            "them with --topics camera=/a,/b"
        )
    plain = [name for name in candidates if name.removesuffix("/compressed") not in set(candidates) - {name}]
    return (_choose("camera", plain, ask),)


def _joint_states(
    by_name: Mapping[str, str], config: Config, named: str | None, truth: str | None, ask: Ask | None
) -> str | None:
    feeds = {expand(feed.partition("=")[2]) for feed in config.robot.state_topics}
    candidates = [
        topic
        for topic, kind in by_name.items()
        if kind == JOINTS and topic != truth and topic not in feeds and not _is_command(topic)
    ]
    usual = expand(config.topics.joint_states)
    return _optional(by_name, "joint_states", named, JOINTS, usual, candidates, ask)


def _instruction(by_name: Mapping[str, str], config: Config, named: str | None, ask: Ask | None) -> str | None:
    words = ("instruction", "task", "language", "prompt", "command_text")
    texts = [t for t, kind in by_name.items() if kind == TEXT and any(word in t.lower() for word in words)]
    return _optional(by_name, "instruction", named, TEXT, expand(config.topics.instruction), texts, ask)


def _truth(by_name: Mapping[str, str], config: Config, named: str | None) -> tuple[str | None, str]:
    """Recorded actions first, then commands, then the joint states themselves."""
    if named == "none":
        return None, ""
    if named == "joint_states":
        return None, JOINTS
    if named:
        name = _named(by_name, named, "truth", COMMAND_TYPES)
        return name, by_name[name]
    action, command = expand(config.topics.action), expand(config.topics.command)
    if by_name.get(action) == ARRAY:
        return action, ARRAY
    ranked = [
        *(name for name, kind in by_name.items() if kind == ARRAY and "action" in name.lower()),
        *(name for name in (command,) if by_name.get(name) in (JOINTS, TRAJECTORY, TWIST)),
        *(name for name, kind in by_name.items() if kind in (TWIST, TRAJECTORY)),
        *(name for name, kind in by_name.items() if kind == JOINTS and _is_command(name)),
    ]
    if ranked:
        return ranked[0], by_name[ranked[0]]
    return None, JOINTS


def _is_command(name: str) -> bool:
    return any(word in name.lower() for word in ("command", "cmd", "target", "desired", "goal"))
