import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tools.size import FOLDERS, ROOT, count_lines, files, repeated_names

SOURCE = ROOT / "src" / "vla_ros"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
EVERYWHERE = "types"


def table() -> list[tuple[set[str], set[str]]]:
    """Modules of each row, and the names in its last column."""
    rows = []
    for line in PAGE.splitlines():
        cells = line.strip("|").split("|")
        if line.startswith("| `") and len(cells) == 3:
            rows.append((set(re.findall("`([a-z_]+)`", cells[0])), set(re.findall("`([a-z_]+)`", cells[2]))))
    return rows


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def package_of(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


PATHS = {name_of(path): path for path in SOURCE.rglob("*.py")}


def imported_modules(path: Path) -> set[str]:
    """Modules of the package that ``path`` imports: at import time, inside functions or for type checking."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= named & PATHS.keys() or {str(node.module)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & PATHS.keys()


ROW_OF = {module: index for index, (modules, _) in enumerate(table()) for module in modules}


def test_every_module_has_one_row_and_every_row_exists() -> None:
    modules = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert set(ROW_OF) == modules - {"__init__"}, "docs/architecture.md names every module in a row"
    assert sum(len(found) for found, _ in table()) == len(ROW_OF)
    assert set().union(*(allowed for _, allowed in table())) <= set(ROW_OF)


@pytest.mark.parametrize("row", range(len(table())), ids=lambda row: min(table()[row][0]))
def test_a_package_imports_only_what_its_row_names(row: int) -> None:
    modules, allowed = table()[row]
    may = {row, ROW_OF[EVERYWHERE], *(ROW_OF[name] for name in allowed)}
    own = {name: path for name, path in PATHS.items() if package_of(name) in modules}
    imports = {(name, other) for name, path in own.items() for other in imported_modules(path)}
    wrong = {f"{name} imports {other}" for name, other in imports if ROW_OF.get(package_of(other), row) not in may}
    assert not wrong


def test_no_two_modules_import_each_other() -> None:
    """Neither directly nor through others, neither at import time nor later."""
    graph = {name: imported_modules(path) - {name} for name, path in PATHS.items()}
    assert sum(map(len, graph.values())) > 200
    TopologicalSorter(graph).prepare()  # raises CycleError and names the modules


def test_no_two_packages_import_each_other() -> None:
    """The table allows none, and a row imports only what its row names."""
    rows = [f"row of {min(modules)}" for modules, _ in table()]
    graph = {rows[index]: {rows[ROW_OF[name]] for name in allowed} for index, (_, allowed) in enumerate(table())}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("family", ["lerobot", "oft", "openvla", "pi"])
def test_a_family_of_models_has_at_most_nine_files(family: str) -> None:
    assert len(files(f"src/vla_ros/policies/{family}")) <= 9


def limits() -> list[int]:
    """The column "at most" of the section "Size"."""
    section = PAGE.split("## Size\n")[1].split("\n## ")[0]
    return [int(number.replace(",", "")) for number in re.findall(r"^\| .* \| ([\d,]+) \|$", section, re.MULTILINE)]


def test_the_code_is_no_larger_than_the_page_states() -> None:
    *wholes, longest, names = limits()
    sizes = [sum(map(count_lines, files(*folders))) for folders in FOLDERS.values()]
    too_large = [what for what, size, most in zip(FOLDERS, sizes, wholes, strict=True) if size > most]
    assert not too_large, f"{sizes} lines of {list(FOLDERS)}, at most {wholes}"
    assert [path for path in files("src") if count_lines(path) > longest] == []
    assert len(found := repeated_names()) <= names, f"give these things names of their own: {found}"


def test_every_example_of_an_addition_exists() -> None:
    section = PAGE.split("## Adding\n")[1].split("\n## ")[0]
    named = re.findall(r"`((?:src|test|config)/[\w/.]+)`", section)
    assert len(named) > 6
    assert [path for path in named if not (ROOT / path).exists()] == []
