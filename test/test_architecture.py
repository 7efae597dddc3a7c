"""The table of rooms in docs/architecture.md is true: no module imports what its room may not know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "vla_ros"
EVERYWHERE = "types"


def table() -> list[tuple[set[str], set[str]]]:
    """Modules of each room, and the names in its last column."""
    rooms = []
    for line in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines():
        cells = line.strip("|").split("|")
        if line.startswith("| `") and len(cells) == 3:
            rooms.append((set(re.findall("`([a-z_]+)`", cells[0])), set(re.findall("`([a-z_]+)`", cells[2]))))
    return rooms


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules of the package's top level that run-time code imports, at whatever depth."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vla_ros."):
            yield str(node.module).split(".")[1]
        elif isinstance(node, ast.ImportFrom) and node.module == "vla_ros":
            yield from (alias.name for alias in node.names if alias.name != "__version__")
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("vla_ros."))
        yield from imports(node)


ROOM_OF = {module: index for index, (modules, _) in enumerate(table()) for module in modules}


def test_every_module_has_one_room_and_no_room_is_of_air() -> None:
    modules = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert set(ROOM_OF) == modules - {"__init__"}, "docs/architecture.md names every module in the row of its room"
    assert sum(len(found) for found, _ in table()) == len(ROOM_OF)
    assert set().union(*(allowed for _, allowed in table())) <= set(ROOM_OF)


@pytest.mark.parametrize("room", range(len(table())), ids=lambda room: min(table()[room][0]))
def test_a_room_imports_only_what_its_row_names(room: int) -> None:
    modules, allowed = table()[room]
    may = {room, ROOM_OF[EVERYWHERE], *(ROOM_OF[name] for name in allowed)}
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path.relative_to(SOURCE).parts[0].removesuffix(".py") in modules:
            found = set(imports(ast.parse(path.read_text(encoding="utf-8"))))
            wrong += [
                f"{path.relative_to(SOURCE)} imports {name}" for name in found if ROOM_OF.get(name) not in may
            ]
    assert not wrong
