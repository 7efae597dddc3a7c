"""Text of messages, files and peers reaches logs, terminals and pages without control characters."""

import io
import json
import logging
from types import SimpleNamespace

import pytest
from rich.console import Console

from vla_ros.cli.main import main
from vla_ros.cli.top import View
from vla_ros.control.publishers import node_of
from vla_ros.control.reasons import Reason, Refused
from vla_ros.errors import ConfigError, PrintableFormatter, one_line, printable
from vla_ros.graph.dds.node import node_logger
from vla_ros.graph.node import printable_logger
from vla_ros_lab.report.markup import tag

WRONG = "\x1b]0;x\x07\x1b[2J\x9b1m\x00\u202etxt\u2028\x7f\ud800"


def obeyed(text: str) -> list[str]:
    """Characters of ``text`` that a terminal may obey; colours of Rich are none."""
    return [each for each in text if not each.isprintable() and each != "\n"]


def test_text_keeps_its_lines_and_letters_and_loses_what_a_terminal_obeys() -> None:
    assert printable("grün 抓\n\tok") == "grün 抓\n\tok"
    assert printable(WRONG) == r"\x1b]0;x\x07\x1b[2J\x9b1m\x00\u202etxt\u2028\x7f\ud800"
    assert one_line("a\nb\tc") == r"a\nb\tc"
    assert one_line("x" * 1000, 10) == "x" * 10 + "..."


def test_errors_and_reasons_are_printable() -> None:
    assert not obeyed(str(ConfigError(f"found {WRONG}")))
    refused = Refused(Reason.JOINT_STATE_INVALID, f"joint {WRONG}")
    assert not obeyed(refused.detail + str(refused))


def test_the_log_of_the_node_and_of_the_server_is_printable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = node_logger("/printable")
    monkeypatch.setattr(
        logger.parent, "propagate", False
    )  # pytest would keep the text as it is, which xdist cannot send
    logger.warning("a topic says %s", WRONG)
    try:
        raise ValueError(WRONG)
    except ValueError:
        logger.exception("failed")
    said = capsys.readouterr().err
    assert "a topic says" in said
    assert "Traceback" in said
    assert not obeyed(said)
    record = logging.LogRecord("serve", logging.ERROR, "", 0, "robot %s", (WRONG,), None)
    assert not obeyed(PrintableFormatter().format(record))


@pytest.mark.parametrize("severity", ["debug", "info", "warning", "error"])
def test_a_logger_of_rclpy_gets_printable_text(severity: str) -> None:
    said: list[str] = []
    logger = printable_logger(SimpleNamespace(**{severity: said.append}))
    getattr(logger, severity)(WRONG)
    assert said == [printable(WRONG)]
    own = logging.getLogger("printable")
    assert printable_logger(own) is own


def test_names_of_nodes_are_printable() -> None:
    assert not obeyed(node_of(SimpleNamespace(node_namespace="/a\n", node_name=WRONG)))


def test_a_page_has_no_control_characters() -> None:
    assert not obeyed(tag("p", WRONG, title=WRONG))


def test_what_a_command_says_is_printable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--config", f"{WRONG[:-1]}.yaml", "--dry-run"]) != 0
    said = capsys.readouterr().err
    assert "no such file" in said
    assert not obeyed(said)


def test_top_shows_what_a_node_says_without_obeying_it() -> None:
    view = View("/vla_policy")
    pair = SimpleNamespace(key=f"dropped/{WRONG}", value=f"{WRONG}[red]")
    status = [
        SimpleNamespace(name=f"vla_policy: {part}", level=0, message=WRONG, values=[pair])
        for part in ("state", "camera", WRONG)
    ]
    view.on_diagnostics(SimpleNamespace(status=status))
    view.on_status(SimpleNamespace(data=json.dumps({"explanation": WRONG, "source": WRONG, "mode": WRONG})))
    written = io.StringIO()
    Console(file=written, width=200, color_system=None).print(view.render())
    assert "[red]" in written.getvalue()
    assert not obeyed(written.getvalue())
