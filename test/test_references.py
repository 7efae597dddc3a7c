"""Every name that a docstring, a comment or docs/architecture.md mentions exists."""

import ast
import builtins
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tools.size import ROOT, files

ROLE = re.compile(r":(?:class|meth|func|mod|data|attr|exc|obj):`~?([\w.]+)`")
LITERAL = re.compile(r"``([A-Za-z_][\w.]*)(?:\(\))?``")
CODE = re.compile(r"`([A-Za-z_][\w./]*(?:::\w+)?)(?:\(\))?`")
_TEXTS = {
    tokenize.NAME,
    tokenize.STRING,
    getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING),
}  # from Python 3.12 on
WORD = re.compile(r"[A-Za-z_]\w*")
OF_OTHERS = {
    "DimSpec", "BenchmarkResult", "incoming_command_timeout", "osc_pose.json",
    "rclpy.action.client.ClientGoalHandle", "rclpy.clock.ROSClock", "RIHS01_", "rcl_serialized_message_t",
    "rcl_subscription_t", "rcutils_allocator_t", "rcutils_uint8_array_t", "rmw_message_info_t",
    "diagnostic_aggregator", "diagnostic_updater", "cv_bridge", "compressed_image_transport",
    "tf.image.crop_and_resize", "tf.image.convert_image_dtype",
    "crop_and_resize", "sinf", "mma", "full_image", "PreTrainedPolicy", "save_model", "gamma", "RAY_ADDRESS",
    "cvtColorForDisplay", "frame_num",
    "tuners_utils.check_target_module_exists", "get_pattern_key",
    "int8_vectorwise_dequant", "should_convert_module", "empty_camera_0", "prepare_state",
    "n1.5", "v0.1", "v0.2", "left_", "right_", "left_wrist", "left_elbow.pos", "red_cube", "bag_9", "bag_10",
    "get_action_chunk_adapter.py", "vla_inference_server.py", "SnapFlowModelMixin", "LAYER.a", "LAYER.scale",
    "sha256sum",
}  # fmt: skip
"""Names of other projects, which only prose mentions, and examples of names that users choose."""


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@cache
def parsed(path: Path) -> tuple[ast.Module, list[ast.Expr], list[tuple[int, str, int]]]:
    """The tree of a file, its docstrings, and the type, text and line of what is no mark of its tokens."""
    source = path.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    kept = [(one.type, one.string, one.start[0]) for one in tokens if one.type in _TEXTS | {tokenize.COMMENT}]
    tree = ast.parse(source)
    return tree, [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and is_docstring(node)], kept


def texts(path: Path) -> Iterator[str]:
    """The docstrings and comments of a file."""
    _, docstrings, tokens = parsed(path)
    yield from (str(ast.literal_eval(node.value)) for node in docstrings)
    yield from (text for kind, text, _ in tokens if kind == tokenize.COMMENT)


@cache
def words() -> frozenset[str]:
    """Every word of the code that is not prose: identifiers, and words of strings such as options and keys."""
    found = set(dir(builtins))
    for path in files("src", "tools", "benchmarks", "fuzz"):
        _, docstrings, tokens = parsed(path)
        prose = {line for one in docstrings for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)}
        for kind, text, line in tokens:
            if kind in _TEXTS and line not in prose:
                found |= set(WORD.findall(text))
        found |= set(path.relative_to(ROOT).with_suffix("").parts)
    return frozenset(found)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")


@cache
def defined() -> frozenset[str]:
    """The full names of modules, and of what they define or import at their top level and in classes."""
    found = set[str]()
    for path in files("src"):
        module = module_of(path)
        found |= {module, *(f"{module}.{name}" for name in members(parsed(path)[0]))}
    return frozenset(found)


def members(tree: ast.Module | ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(tree) if isinstance(tree, ast.ClassDef) else tree.body:
        if isinstance(node, ast.ClassDef) and node is not tree:
            yield node.name
            yield from (f"{node.name}.{name}" for name in members(node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from (one.id for one in ast.walk(target) if isinstance(one, ast.Name))
                yield from (one.attr for one in ast.walk(target) if isinstance(one, ast.Attribute))


@cache
def of_classes() -> frozenset[str]:
    """``Class.member`` of every class."""
    ends = (name.split(".")[-2:] for name in defined())
    return frozenset(".".join(end) for end in ends if end[0][:1].isupper())


@cache
def classes() -> frozenset[str]:
    return frozenset(name.split(".")[0] for name in of_classes())


def resolves(target: str, path: Path) -> bool:
    """Whether a role's target is a full name, a class, or a name in the module or in a class there."""
    module = module_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    if {target, f"{module}.{target}", f"{package}{target}" if target.startswith(".") else ""} & defined():
        return True
    if "." in target:
        return target in of_classes()
    own = f"{module}."
    return target in classes() | set(dir(builtins)) or any(
        name.startswith(own) and name.endswith(f".{target}") for name in defined()
    )


def is_known(name: str) -> bool:
    """Whether a name in backticks occurs in the code; ``Class.member`` has to be a member of the class."""
    parts = name.strip(".").split(".")
    if len(parts) == 2 and parts[0] in classes():
        return name in of_classes()
    return name in OF_OTHERS or set(parts) <= words()


def test_every_role_of_a_docstring_resolves() -> None:
    found = [(path, target) for path in files("src") for text in texts(path) for target in ROLE.findall(text)]
    assert len(found) > 400
    wrong = [f"{path.relative_to(ROOT)}: {target}" for path, target in found if not resolves(target, path)]
    assert not wrong, "\n".join(wrong)


def test_every_name_in_backticks_is_in_the_code() -> None:
    found = {(path, name) for path in files("src") for text in texts(path) for name in LITERAL.findall(text)}
    assert len(found) > 1000
    wrong = sorted(f"{path.relative_to(ROOT)}: {name}" for path, name in found if not is_known(name))
    assert not wrong, "\n".join(wrong)


def test_no_name_of_others_is_listed_in_vain() -> None:
    assert not [name for name in OF_OTHERS if set(name.strip(".").split(".")) <= words()]


def test_every_name_of_the_architecture_page_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tests = {path.name for path in files("test")}
    folders = [ROOT, *(ROOT / "src" / house for house in ("vla_ros", "vla_ros_models", "vla_ros_lab"))]
    wrong = list[str]()
    for name in CODE.findall(page):
        file, _, function = name.partition("::")
        if file.endswith((".py", ".yaml")) and file not in tests:
            places = [folder / file for folder in (*folders, *folders[2].iterdir()) if (folder / file).exists()]
            if not places or (function and f"def {function}(" not in places[0].read_text(encoding="utf-8")):
                wrong.append(name)
        elif file not in tests and "/" not in name and not is_known(name.removesuffix(".json")):
            wrong.append(name)
    assert not wrong
