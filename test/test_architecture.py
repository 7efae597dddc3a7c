import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tools.size import FOLDERS, ROOT, count_code, count_lines, files, repeated_names

SOURCE = ROOT / "src"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROBOT, MODELS, LABORATORY = HOUSES = ("vla_ros", "vla_ros_models", "vla_ros_lab")
MAY_ENTER = {ROBOT: (ROBOT,), MODELS: (MODELS, ROBOT), LABORATORY: (LABORATORY, ROBOT, MODELS)}
"""The houses that each house may import, its own first."""
CROSSES = {"types", "errors", "config", "contract", "files", "vision", "policies", "houses"}
"""What the models may import of the robot's house; nothing of it is a node, and nothing reaches an arm."""
EVERYWHERE = (ROBOT, "types")

Row = tuple[str, set[str], set[str]]


def table() -> list[Row]:
    """The house, the modules, and the names in the last column of each row."""
    rows = list[Row]()
    for section in PAGE.split("\n### ")[1:]:
        house = re.match(r".*: `src/(\w+)`\n", section)
        for line in section.split("\n## ")[0].splitlines() if house else ():
            cells = line.strip("|").split("|")
            if line.startswith("| `") and len(cells) == 3:
                named = [set(re.findall("`([a-z_]+)`", cells[index])) for index in (0, 2)]
                rows.append((house[1] if house else "", named[0], named[1]))
    return rows


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def room_of(name: str) -> tuple[str, str]:
    """The house and the top-level module or package of a module."""
    house, _, rest = name.partition(".")
    return house, rest.split(".")[0]


PATHS = {name_of(path): path for path in SOURCE.rglob("*.py")}


def imported_modules(path: Path) -> set[str]:
    """Modules of the houses that ``path`` imports: at import time, inside functions or for type checking."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= named & PATHS.keys() or {str(node.module)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & PATHS.keys()


ROW_OF = {(house, module): index for index, (house, modules, _) in enumerate(table()) for module in modules}


def rows_named(house: str, names: set[str]) -> set[int]:
    """The rows that a last column names; a name means the first house that has it, the own one first."""
    return {next(ROW_OF[other, name] for other in MAY_ENTER[house] if (other, name) in ROW_OF) for name in names}


@pytest.mark.parametrize("house", HOUSES)
def test_every_module_has_one_row_and_every_row_exists(house: str) -> None:
    folder = SOURCE / house
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {name for home, name in ROW_OF if home == house} == modules - {"__init__"}, (
        "docs/architecture.md names all"
    )
    assert sum(len(found) for home, found, _ in table() if home == house) == len(modules) - 1


@pytest.mark.parametrize(
    "row", range(len(table())), ids=lambda row: "-".join((table()[row][0], min(table()[row][1])))
)
def test_a_package_imports_only_what_its_row_names(row: int) -> None:
    house, modules, allowed = table()[row]
    may = {row, ROW_OF[EVERYWHERE], *rows_named(house, allowed)}
    own = {name: path for name, path in PATHS.items() if room_of(name)[0] == house and room_of(name)[1] in modules}
    imports = {(name, other) for name, path in own.items() for other in imported_modules(path)}
    wrong = {f"{name} imports {other}" for name, other in imports if ROW_OF.get(room_of(other), row) not in may}
    assert not wrong


@pytest.mark.parametrize("house", HOUSES)
def test_a_house_enters_only_the_houses_below_it(house: str) -> None:
    imports = {
        (name, room_of(other))
        for name in PATHS
        if room_of(name)[0] == house
        for other in imported_modules(PATHS[name])
    }
    assert {home for _, (home, _) in imports} <= set(MAY_ENTER[house])
    if house == MODELS:
        crossing = {name: room for name, (home, room) in imports if home == ROBOT and room}
        assert set(crossing.values()) <= CROSSES, crossing


def test_no_two_modules_import_each_other() -> None:
    """Neither directly nor through others, neither at import time nor later."""
    graph = {name: imported_modules(path) - {name} for name, path in PATHS.items()}
    assert sum(map(len, graph.values())) > 200
    TopologicalSorter(graph).prepare()  # raises CycleError and names the modules


def test_the_wheel_imports_nothing_that_only_a_clone_has() -> None:
    found = set[str]()
    for path in PATHS.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            found |= {
                f"{path}: {name}" for name in names if name.split(".")[0] in ("benchmarks", "tools", "test", "fuzz")
            }
    assert not found


def test_no_two_packages_import_each_other() -> None:
    """The tables allow none, and a row imports only what its row names."""
    names = [f"row of {house}.{min(modules)}" for house, modules, _ in table()]
    graph = {
        names[index]: {names[row] for row in rows_named(house, allowed)}
        for index, (house, _, allowed) in enumerate(table())
    }
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("family", ["lerobot", "oft", "openvla", "pi", "smolvla"])
def test_a_family_of_models_has_at_most_ten_files(family: str) -> None:
    assert len(files(f"src/vla_ros_models/{family}")) <= 10


def limits() -> list[int]:
    """The column "at most" of the section "Size"."""
    section = PAGE.split("## Size\n")[1].split("\n## ")[0]
    return [int(number.replace(",", "")) for number in re.findall(r"^\| .* \| ([\d,]+) \|$", section, re.MULTILINE)]


def test_the_code_is_no_larger_than_the_page_states() -> None:
    *wholes, longest, names = limits()
    sizes = [sum(map(count_code, files(*folders))) for folders in FOLDERS.values()]
    too_large = [what for what, size, most in zip(FOLDERS, sizes, wholes, strict=True) if size > most]
    assert not too_large, f"{sizes} code lines of {list(FOLDERS)}, at most {wholes}"
    assert [path for path in files("src") if count_lines(path) > longest] == []
    assert len(found := repeated_names()) <= names, f"give these things names of their own: {found}"


def test_every_example_of_an_addition_exists() -> None:
    section = PAGE.split("## Adding\n")[1].split("\n## ")[0]
    named = re.findall(r"`((?:src|test|config)/[\w/.]+)`", section)
    assert len(named) > 6
    assert [path for path in named if not (ROOT / path).exists()] == []
