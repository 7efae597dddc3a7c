import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

pytest.importorskip("rosbags", reason="the library rosbags is not installed (extra 'dds')")

from vla_ros.cli.top import View
from vla_ros.control.outcome import REPLACED, FrameOutcome
from vla_ros.control.reasons import Reason
from vla_ros.control.safety import Safety
from vla_ros.graph.messages import message_types
from vla_ros.telemetry import diagnostics
from vla_ros.telemetry.stats import Stats


def shown(view: View, width: int = 140) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view.render())
    return console.export_text()


@pytest.fixture
def view() -> View:
    safety, stats = Safety(), Stats()
    safety.arm()
    safety.hold(Reason.CAMERA_STALE, "/camera: none for 3 s")
    stats.received()
    for _ in range(41):
        stats.on_outcome(FrameOutcome(1, "/camera", 2, REPLACED))
    stats.record({"inference": 12.5})
    parts = [
        diagnostics.state_part(safety.status, safety.counters, "pick up the [red] cup"),
        diagnostics.frames_part(stats.frames()),
        diagnostics.latency_part(stats.latency_ms()),
        diagnostics.execution_part({"stalled_share": 0.25, "seconds": 8.0, "seam_ratio": 1.125}),
        diagnostics.policy_part({"outside_bins": 3, "draft_accepted": 7, "logit_margins": (0.1, 0.2)}, 3),
        diagnostics.process_part({"resident_bytes": 200 << 20, "threads": 7}),
    ]
    types = message_types("jazzy")
    view = View("/vla_policy")
    view.on_diagnostics(diagnostics.diagnostic_array(parts, "/vla_policy", 0, types.message))
    view.on_status(SimpleNamespace(data=json.dumps({"state": safety.state.value, "explanation": safety.explain()})))
    return view


@pytest.mark.parametrize("width", [80, 140])
def test_state_reasons_latency_and_counts_are_shown(view: View, width: int) -> None:
    text = " ".join(shown(view, width).replace("│", " ").split())
    for expected in (
        "holding: camera_stale (/camera: none for 3 s)",
        "pick up the [red] cup",
        "inference",
        "12.500",
        "dropped/replaced",
        "stalled for 25.0% of 8 s, acceleration at seams 1.1 times that within chunks",
        "seam_ratio",
        "41",
        "count/camera_stale",
        "200 MiB resident",
        "3 tokens were not action tokens",
    ):
        assert expected in text


def test_rates_are_those_between_the_nodes_own_messages() -> None:
    now = 100.0
    view, types = View("/vla_policy", lambda: now), message_types("jazzy")

    def publish(node: str, received: int) -> None:
        values = {"received": str(received), "commands": str(received // 2)}
        part = diagnostics.PartStatus("camera", 0, "", values)
        view.on_diagnostics(diagnostics.diagnostic_array([part], node, 0, types.message))

    for at, node, received in ((100.0, "/other", 9), (101.0, "/vla_policy", 500), (101.9, "/other", 9)):
        now = at
        publish(node, received)
        assert "rates" not in shown(view)
    now = 102.0
    publish("/vla_policy", 520)
    assert "20.0 frames/s in, 10.0 commands/s out" in shown(view)


def test_other_nodes_and_invalid_status_are_ignored(view: View) -> None:
    before = shown(view)
    types = message_types("jazzy")
    part = diagnostics.PartStatus("state", 2, "stopped: driver_gone", {})
    view.on_diagnostics(diagnostics.diagnostic_array([part], "/other_arm", 0, types.message))
    view.on_status(SimpleNamespace(data="{"))
    view.on_status(SimpleNamespace(data="[1]"))
    assert shown(view) == before


def test_missing_diagnostics_are_reported() -> None:
    assert "nothing on /diagnostics from /vla_policy yet" in shown(View("/vla_policy"))


def test_stale_diagnostics_are_reported(view: View) -> None:
    assert view.received_at is not None
    view.received_at -= 10
    assert "no diagnostics for 10 s" in shown(view)
