"""Prints the size of the code, its longest files, and the top-level names that several files define.

    python -m tools.size

test/test_architecture.py holds these figures to the limits that docs/architecture.md states.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "robot": ("src/vla_ros",),
    "models": ("src/vla_ros_models",),
    "laboratory": ("src/vla_ros_lab",),
    "tools": ("tools", "benchmarks", "fuzz"),
    "test": ("test",),
}
"""What is counted, and its folders."""
INTERFACES = {
    "every file": ("logger",),
    "a house": ("HOUSE", "examine"),
    "a command": ("add_arguments", "run", "main"),
    "a dialect of policy servers": ("query", "answer", "metadata", "reset"),
    "a format of weights": ("quantize", "dequantize"),
    "a family of models": (
        *(
            "build_empty",
            "check_weights",
            "load_tokenizer",
            "make_engine",
            "plan_memory",
            "load_model",
            "load_network",
            "deviation_of",
            "make_trainable",
        ),
        *("read_architecture", "read_checkpoint", "Processing", "PromptEncoder", "Manifest", "EMBEDDINGS", "FILES"),
    ),
}
"""Names that several files define on purpose, with the same meaning: each implements its part of an interface."""
_COMMENT_OR_STRING = re.compile(
    r"#[^\n]*|" + "|".join(rf"{q}(?:[^\\]|\\.)*?{q}" for q in ('"""', "'''", '"', "'")), re.DOTALL
)
_ON_PURPOSE = {name for names in INTERFACES.values() for name in names}


def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def count_code(path: Path) -> int:
    """Count the lines of a file without blanks, comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    code = _COMMENT_OR_STRING.sub(lambda found: "" if found[0][0] == "#" else re.sub("(?m)^$", "x", found[0]), text)
    lines = {number for number, line in enumerate(code.split("\n"), 1) if line.strip(" \\")}
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def repeated_names() -> dict[str, list[str]]:
    """Return the top-level names that several files of the package define, each with these files.

    Classes, functions and constants count. Names with a leading underscore, type variables and
    :data:`INTERFACES` do not.
    """
    found = defaultdict[str, set[str]](set)
    for path in files("src"):
        for name in _defined(ast.parse(path.read_text(encoding="utf-8"))):
            found[name].add(path.relative_to(ROOT / "src").as_posix())
    return {name: sorted(where) for name, where in sorted(found.items()) if len(where) > 1}


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign) and not _is_type_variable(node.value):
            names = [one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            continue
        yield from (name for name in names if not name.startswith("_") and name not in _ON_PURPOSE)


def _is_type_variable(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "TypeVar"


def main() -> None:
    for title, folders in FOLDERS.items():
        print(f"{title}: {sum(map(count_code, files(*folders))):,} code lines")
    longest = sorted(files("src"), key=count_lines, reverse=True)[:5]
    print("longest files:", ", ".join(f"{path.relative_to(ROOT)} {count_lines(path)}" for path in longest))
    names = repeated_names()
    print(f"names defined in several files: {len(names)}")
    for name, where in names.items():
        print(f"  {name}: {', '.join(where)}")


if __name__ == "__main__":
    main()
