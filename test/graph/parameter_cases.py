"""70 command lines with parameter files, and what an rclpy node of ROS 2 Jazzy made of them.

They were drawn at random: keys with and without wildcards, nested and flat, several files and ``-p``, remaps of
node and namespace, wrong keys and values. rcl keeps a nested name a second time beside the first one, and a flat
name afterwards replaces only the first; that mistake is not ours to repeat, so no name is flat after it was nested
twice.

With ROS 2 sourced, ``python test/graph/parameter_cases.py`` asks rclpy again and writes its answers: the node's
full name and its parameters, or null where rcl refuses.
"""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "data" / "rclpy_parameters.json"


def read_cases() -> list[dict[str, Any]]:
    """Each case's ``words``, which name a file by ``{number}``, the texts of its ``files``, and the ``answer``."""
    cases: list[dict[str, Any]] = json.loads(FILE.read_text())
    return cases


def write_files(case: dict[str, Any], folder: Path) -> list[str]:
    """Write the files of a case; return its command line."""
    names = [folder / f"{number}.yaml" for number in range(len(case["files"]))]
    for name, text in zip(names, case["files"], strict=True):
        name.write_text(text)
    return ["--ros-args", *(str(names[int(word[1])]) if word[0] == "{" else word for word in case["words"])]


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
        rows = [{**case, "answer": rclpy_answer(write_files(case, Path(place)))} for case in read_cases()]
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
