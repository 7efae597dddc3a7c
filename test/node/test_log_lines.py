import ast
import re
from pathlib import Path

import vla_ros

ROOT = Path(vla_ros.__file__).parent
SEVERITIES = {"debug", "info", "warning", "error", "fatal"}
LOGS = re.compile(rf"\.({'|'.join(sorted(SEVERITIES))})\b|getattr\(.*logger")


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


def test_no_line_chooses_its_severity() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}
    logs = {path: source for path, source in sources.items() if LOGS.search(source)}
    assert len(logs) > 30
    assert {str(path): lines for path, source in logs.items() if (lines := choices(source))} == {}
