"""Two hundred command lines with parameter files, and what an rclpy node of ROS 2 Jazzy made of them.

With ROS 2 sourced, ``python test/graph/parameter_cases.py`` asks rclpy and writes
``test/data/rclpy_parameters.json``: the node's full name and its parameters, or null where rcl refuses.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANSWERS = Path(__file__).parents[1] / "data" / "rclpy_parameters.json"
NODES = (("vla_policy", "/"), ("vla_policy", "/robot_1"), ("vla_policy", "/site/robot_1"), ("left_arm_policy", "/"))
KEYS = (
    *("/**", "/**", "/*", "/*/*", "**", "*", "/**/*", "/*/**"),
    *("vla_policy", "/vla_policy", "/vla_policy", "left_arm_policy", "/left_arm_policy"),
    *("robot_1/vla_policy", "/robot_1/vla_policy", "/robot_2/vla_policy", "/site/robot_1/vla_policy"),
    *("/robot_1/**", "/robot_1/*", "/robot_2/**", "/site/**", "/site/*", "/vla_policy/**", "/site/*/vla_policy"),
    *("/**/vla_policy", "/*/vla_policy", "**/vla_policy", "/**/robot_1/*", "/**/robot_1/**", "/**/left_arm_policy"),
)
WRONG_KEYS = (
    "/robot_*/vla_policy",
    "/robot-1/vla_policy",
    "/1st/vla_policy",
    "/a//vla_policy",
    "/vla_policy/",
    "/***",
)
VALUES: dict[str, tuple[str, ...]] = {  # each name keeps its type
    "control.armed": ("true", "False", "yes", "n", "on", "OFF"),
    "limits.velocity_scale": ("0.1", "1.0", "1e-1", "2.5e-1", ".5", "1.", "5E-1"),
    "camera.count": ("1", "2", "0x10", "010", "-3", "+4"),
    "policy.name": ("hold", "'1'", '"y"', "openvla", "1_000", "1:30", "2026-11-23", "0o7", "!!str 5"),
    "robot.home": ("[0.1, 2.0]", "[1e-3]", "[.inf, -.inf]"),
    "robot.arms": ("[left, right]", "['1', b]", "[single]"),
    "rate": ("10.0", "3e1"),
}


@dataclass(frozen=True)
class Case:
    """One command line; ``words`` names a file by ``{number}``."""

    words: tuple[str, ...]
    files: tuple[str, ...]

    def write(self, folder: Path) -> list[str]:
        for number, text in enumerate(self.files):
            (folder / f"{number}.yaml").write_text(text)
        names = [str(folder / f"{number}.yaml") for number in range(len(self.files))]
        return ["--ros-args", *(names[int(word[1])] if word[0] == "{" else word for word in self.words)]


def _emit(tree: dict[str, Any], margin: str = "") -> str:
    """YAML of nested keys; the leaves are YAML already."""
    lines = (
        f"{margin}{key!r}:\n{_emit(below, margin + '  ')}"
        if isinstance(below, dict)
        else f"{margin}{key}: {below}\n"
        for key, below in tree.items()
    )
    return "".join(lines)


def _section(draw: random.Random, key: str, nested: Counter[tuple[str, str]]) -> dict[str, Any]:
    """One section. ``nested`` counts which names of each section were nested so far.

    rcl keeps a nested name a second time beside the first one; a flat name afterwards only replaces the first, and
    is lost. That mistake is not ours to repeat, so no name is flat after it was nested twice.
    """
    values: dict[str, Any] = {}
    for name in draw.sample(sorted(VALUES), draw.randint(1, 4)):
        head, _, leaf = name.rpartition(".")
        value = draw.choice(VALUES[name])
        if head and (draw.random() < 0.3 or nested[key, name] > 1):
            values.setdefault(head, {})[leaf] = value
            nested[key, name] += 1
        else:
            values[name] = value
    tree = {"ros__parameters": values}
    first, slash, rest = key.removeprefix("/").partition("/")
    if slash and draw.random() < 0.3:
        return {"/" * key.startswith("/") + first: {rest: tree}}
    return {key: tree}


def _file(draw: random.Random, nested: Counter[tuple[str, str]]) -> str:
    keys = [draw.choice(KEYS) for _ in range(draw.randint(1, 5))]
    if draw.random() < 0.03:
        keys.append(draw.choice(WRONG_KEYS))
    tree: dict[str, Any] = {}
    for key in keys:
        for head, below in _section(draw, key, nested).items():
            tree.setdefault(head, below)  # our reader refuses a key that appears twice
    return _emit(tree)


def _case(draw: random.Random) -> Case:
    files: list[str] = []
    words: list[str] = []
    nested: Counter[tuple[str, str]] = Counter()
    flags = ["--params-file"] * draw.randint(1, 3) + ["-p"] * draw.randint(0, 3)
    draw.shuffle(flags)
    for flag in flags:
        if flag == "--params-file":
            words += [flag, f"{{{len(files)}}}"]
            files.append(_file(draw, nested))
            continue
        node, name = draw.choice(("", "", "vla_policy", "left_arm_policy", "robot_1")), draw.choice(sorted(VALUES))
        if nested[node or "/**", name] < 2:
            words += [flag, f"{node}{':' * bool(node)}{name}:={draw.choice(VALUES[name])}"]
    name, space = draw.choice(NODES)
    if name != "vla_policy":
        words += ["-r", f"{draw.choice(('', 'vla_policy:'))}__node:={name}"]
    if space != "/":
        words += ["-r", f"{draw.choice(('', f'{name}:'))}__ns:={space}"]
    if draw.random() < 0.1:
        words += ["-r", "other:__ns:=/elsewhere"]
    return Case(tuple(words), tuple(files))


def cases(count: int = 200, seed: int = 28) -> Iterator[Case]:
    draw = random.Random(seed)
    for _ in range(count):
        yield _case(draw)


def rclpy_answer(words: list[str]) -> dict[str, Any] | None:
    """What an rclpy node, created as ``vla_policy`` with these arguments, is called and has as parameters."""
    import rclpy
    from rclpy.context import Context
    from rclpy.node import Node

    context = Context()
    try:
        rclpy.init(args=words, context=context)
    except Exception:
        return None
    try:
        node = Node("vla_policy", context=context, enable_rosout=False, start_parameter_services=False)
        values = {name: parameter.value for name, parameter in node._parameter_overrides.items()}
        full_name = node.get_fully_qualified_name()
        node.destroy_node()
    finally:
        rclpy.shutdown(context=context)
    plain = {name: list(value) if hasattr(value, "tolist") else value for name, value in values.items()}
    return {"node": full_name, "values": dict(sorted(plain.items()))}


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        rows = [json.dumps(rclpy_answer(case.write(Path(place)))) for case in cases()]
    ANSWERS.write_text("[\n" + ",\n".join(rows) + "\n]\n")
