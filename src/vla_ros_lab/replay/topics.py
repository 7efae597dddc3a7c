"""Finds the topics of a bag by type and name; if several fit, asks a person or rejects the bag."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from vla_ros.config import Config, node_topics
from vla_ros.config.sections import COMPRESSED, CameraConfig, TopicsConfig
from vla_ros.vision.messages import IMAGE_TYPES
from vla_ros_lab.replay.bag import Bag
from vla_ros_lab.replay.storage import BagError

_TRANSPORTS = {kind: transport for transport, kind in IMAGE_TYPES.items()}
JOINTS = "sensor_msgs/msg/JointState"
TEXT = "std_msgs/msg/String"
ARRAY = "std_msgs/msg/Float64MultiArray"
TRAJECTORY = "trajectory_msgs/msg/JointTrajectory"
TWIST = "geometry_msgs/msg/TwistStamped"
COMMAND_TYPES = (JOINTS, TRAJECTORY, TWIST, ARRAY)

NODE = "vla_policy"
"""Name of the live node, which ``~`` stands for in topic names."""

_MOST_LOSSES = 5
_ROLES = ("camera", "joint_states", "instruction", "truth")

Topics = Mapping[str, str]
"""Topic to type, or role to topic."""

Ask = Callable[[str, Sequence[str]], str]
"""Asks a person: takes a question and the candidates, and returns one candidate."""


@dataclass(frozen=True)
class TopicSelection:
    """Topics by role."""

    cameras: tuple[str, ...]  # one topic per camera of the policy, in the order of ``camera.topics``
    transport: str  # ``raw`` or ``compressed``; the same for all cameras whose topics do not say it
    joint_states: tuple[str, ...]  # topics of measured joint states; several if arms have separate topics
    instruction: str | None  # topic of the instruction, or None
    truth: tuple[str, ...]  # topics of recorded actions or commands; several if arms have separate topics
    # Type of the ``truth`` topics. JointState without topics means differences of joint states; "" means no truth.
    truth_type: str
    state: tuple[tuple[str, str], ...] = ()  # name to topic (``robot.state_topics``)
    # The node's events and its status, which tell the instruction in force; "" if there is none, or if ``--topics``
    # names the instruction's topic.
    instruction_reports: tuple[str, str] = ("", "")

    @property
    def described(self) -> dict[str, str]:
        """Map each role to its topics as readable text."""
        joints = ", ".join(self.joint_states) or "none"
        truth = f"{joints}, differenced" if self.truth_type else "none"
        return {
            "camera": ", ".join(self.cameras),
            "joint_states": joints,
            "instruction": self.instruction or "none",
            "truth": f"{', '.join(self.truth)} ({self.truth_type})" if self.truth else truth,
        }


def live_name(name: str) -> str:
    """Return a topic name as the live node would resolve it."""
    if name.startswith("~"):
        return f"/{NODE}{name[1:]}"
    return name if name.startswith("/") else f"/{name}"


def parse_overrides(texts: Sequence[str]) -> dict[str, str]:
    """Parse ``role=/topic`` pairs of ``--topics``; several cameras or joint states are separated by commas."""
    overrides: dict[str, str] = {}
    for text in texts:
        role, separator, topic = text.partition("=")
        if not separator or role not in _ROLES:
            raise BagError(f"--topics {text}: expected role=/topic with a role of {', '.join(_ROLES)}")
        overrides[role] = topic
    return overrides


def topics_of(bag: Bag, config: Config, overrides: Mapping[str, str], ask: Ask | None = None) -> TopicSelection:
    """Find a topic of ``bag`` for every role, see :func:`select_topics`; an error also has what cannot be read."""
    try:
        return select_topics(bag.topics, config, overrides, ask, bag.empty)
    except BagError as error:
        lost = "".join(f"\n  not read: {loss}" for loss in bag.losses[:_MOST_LOSSES])
        raise BagError(f"{error}{lost}") from None


def select_topics(
    topics: Topics, config: Config, overrides: Topics, ask: Ask | None = None, empty: Collection[str] = ()
) -> TopicSelection:
    """Find a topic for every role.

    Names in ``overrides`` (``--topics``) come first, then names in ``config`` that the bag has. Topics without
    messages (``empty``) are ignored unless they are named. If several fit, ``ask`` asks a person.

    Raises:
        BagError: There is no camera, a named topic is missing or has the wrong type, or several topics fit and
            ``ask`` is None; the text lists the candidates.
    """
    named = {name for names in overrides.values() for name in names.split(",")}
    by_name = {name: kind for name, kind in topics.items() if name not in empty or name in named}
    find = _Finder(by_name, config, overrides, ask)
    cameras = find.cameras()
    transports = {_TRANSPORTS[by_name[name]] for name in cameras if not name.endswith(COMPRESSED)}
    if len(transports) > 1:
        raise BagError(f"the cameras {list(cameras)} mix raw and compressed; name topics of one kind with --topics")
    state_topics = [(topic.name, live_name(topic.topic)) for topic in config.robot.parsed_state_topics]
    truth, truth_type = find.truth()
    taken = {*truth, *(topic for _, topic in state_topics)}
    states = [name for name in find.of_type(JOINTS) if name not in taken and not _is_command(name)]
    usual = tuple(dict.fromkeys(live_name(arm.joint_states) for arm in config.arms))
    option = "topics.joint_states" if usual != (live_name(TopicsConfig().joint_states),) else ""
    joints = find.topics("joint_states", (JOINTS,), usual, states, option)
    if truth_type == JOINTS and not (truth or joints):
        truth_type = ""
    texts = [name for name in find.of_type(TEXT) if _has_word(name, _INSTRUCTING)]
    instructions = find.topics("instruction", (TEXT,), (live_name(node_topics.INSTRUCTION),), texts)
    state = tuple((key, topic) for key, topic in state_topics if topic in by_name)
    event, status = (
        name if by_name.get(name) == TEXT and "instruction" not in overrides else ""
        for name in map(live_name, (node_topics.EVENT, node_topics.STATUS))
    )
    instruction = next(iter(instructions), None)
    inputs = (cameras, next(iter(transports), "compressed"), joints, instruction)
    return TopicSelection(*inputs, truth, truth_type, state, (event, status))


@dataclass(frozen=True)
class _Finder:
    """Finds topics in ``by_name``, which maps topic to type; for other fields, see :func:`select_topics`."""

    by_name: Mapping[str, str]
    config: Config
    overrides: Mapping[str, str]
    ask: Ask | None

    def of_type(self, *types: str) -> list[str]:
        return [name for name, kind in self.by_name.items() if kind in types]

    def named(self, role: str, types: Collection[str]) -> tuple[str, ...] | None:
        """Return the topics that ``--topics`` names for a role, after checks; None if the role is not named."""
        text = self.overrides.get(role)
        if text in (None, "", "none"):
            return None if text is None else ()
        names = tuple(name.strip() for name in str(text).split(","))
        for name in names:
            if name not in self.by_name:
                known = ", ".join(sorted(self.by_name))
                raise BagError(f"--topics {role}={name}: the bag has no such topic; it has {known}")
            if self.by_name[name] not in types:
                found = self.by_name[name]
                raise BagError(f"--topics {role}={name}: found {found}, expected {' or '.join(types)}")
        return names

    def topics(
        self, role: str, types: Collection[str], usual: tuple[str, ...], candidates: Sequence[str], option: str = ""
    ) -> tuple[str, ...]:
        """Return the topics from ``--topics``, the ``usual`` topics if the bag has them all, or a candidate.

        No candidate replaces topics that an ``option`` names.
        """
        if (named := self.named(role, types)) is not None:
            return named
        if usual and all(self.by_name.get(name) in types for name in usual):
            return usual
        if option and candidates:
            found = f"found {list(usual)}, but the bag has {list(candidates)}"
            raise BagError(f"{option}: {found}; set it to one of them, or name one with --topics {role}=/a")
        if len(candidates) < 2:
            return tuple(candidates)
        if self.ask is None:
            listed = "\n".join(f"  --topics {role}={name}" for name in candidates)
            raise BagError(f"several topics could be the {role.replace('_', ' ')}; name one:\n{listed}")
        return (self.ask(f"Which topic is the {role.replace('_', ' ')}?", candidates),)

    def cameras(self) -> tuple[str, ...]:
        candidates = [name for name in self.of_type(*_TRANSPORTS) if "depth" not in name.lower()]
        if not candidates:
            found = ", ".join(f"{name} ({kind})" for name, kind in sorted(self.by_name.items())) or "no topics"
            raise BagError(f"the bag has no sensor_msgs/Image or CompressedImage; it has {found}")
        usual = []
        for name in map(live_name, self.config.camera.topics):
            base = name.removesuffix("/compressed")
            variants = [one for one in (name, f"{name}/compressed", base) if one in candidates]
            below = [one for one in candidates if one.startswith(f"{base}/")]  # another transport, such as video
            usual.append(variants[0] if variants else below[0] if len(below) == 1 else name)
        plain = [name for name in candidates if name.removesuffix("/compressed") not in set(candidates) - {name}]
        option = "camera.topics" if self.config.camera.topics != CameraConfig().topics else ""
        cameras = self.topics("camera", _TRANSPORTS, tuple(usual), plain if len(usual) == 1 else (), option)
        if len(cameras) != len(usual):
            found = f"found {list(self.config.camera.topics)}, but the bag has {candidates}"
            raise BagError(f"camera.topics: {found}; name {len(usual)} of them with --topics camera=/a,/b")
        return cameras

    def truth(self) -> tuple[tuple[str, ...], str]:
        """Return topics and type of recorded actions, or else commands, or else joint states (no topics).

        A name in the configuration counts more than a name that sounds like a command, and that more than a type:
        a measured twist has the type of a commanded one.
        """
        if self.overrides.get("truth") == _MEASURED:
            return (), JOINTS
        if (named := self.named("truth", COMMAND_TYPES)) is not None:
            kinds = {self.by_name[name] for name in named}
            if len(kinds) > 1:
                raise BagError(f"--topics truth={','.join(named)}: found {sorted(kinds)}, expected one type")
            return named, next(iter(kinds), "")
        action, command = live_name(node_topics.ACTION), live_name(self.config.topics.command)
        arms = tuple(dict.fromkeys(live_name(arm.command) for arm in self.config.arms))
        if self.by_name.get(action) == ARRAY:
            return (action,), ARRAY
        if len(kinds := {self.by_name.get(name, "") for name in arms}) == 1 and kinds <= {JOINTS, TRAJECTORY}:
            return arms, kinds.pop()
        if self.by_name.get(command) in (JOINTS, TRAJECTORY, TWIST):
            return (command,), self.by_name[command]
        twists = [name for name in self.of_type(TWIST) if not _has_word(name, _MEASURING)]
        for candidates in (
            [name for name in self.of_type(ARRAY) if "action" in name.lower()],
            [name for name in self.of_type(JOINTS, TRAJECTORY, TWIST) if _is_command(name)],
            self.of_type(TRAJECTORY),
            [*twists, *([_MEASURED] if self.of_type(JOINTS) else [])] if twists else [],
        ):
            if chosen := self.topics("truth", (), (), candidates) if candidates else ():
                return (chosen, self.by_name[chosen[0]]) if chosen[0] != _MEASURED else ((), JOINTS)
        return (), JOINTS


def _has_word(name: str, words: str) -> bool:
    return any(word in name.lower() for word in words.split())


_MEASURED = "joint_states"  # as the truth: the motion of the measured joints
_INSTRUCTING = "instruction task language prompt command_text"
_MEASURING = "current measured actual state feedback odom estimated sensed"


def _is_command(name: str) -> bool:
    return _has_word(name, "command cmd target desired goal")
