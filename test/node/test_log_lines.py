import ast
from pathlib import Path

import pytest

import vla_ros

ROOT = Path(vla_ros.__file__).parent
SEVERITIES = {"debug", "info", "warning", "error", "fatal"}


def choices(source: str) -> list[int]:
    """Lines in which an expression chooses between a logger's methods."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.IfExp):
            ends = [end.attr for end in (node.body, node.orelse) if isinstance(end, ast.Attribute)]
            if SEVERITIES.intersection(ends):
                found.append(node.lineno)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and "logger" in ast.unparse(node):
            found.append(node.lineno)
    return found


def test_a_choice_is_found() -> None:
    assert choices("(a.info if well else a.warning)('x')") == [1]
    assert choices("say = self._logger.error if bad else print") == [1]
    assert choices("getattr(logger, name)('x')") == [1]
    assert choices("a.info('x') if well else a.warning('x')\nlogger.error('x')") == []


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_line_chooses_its_severity(path: Path) -> None:
    assert choices(path.read_text(encoding="utf-8")) == []
