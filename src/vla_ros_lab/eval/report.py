"""HTML report of an evaluation: rates with intervals, videos with failures first, every episode."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_ros.files import save_text
from vla_ros_lab.eval.results import Score, Summary, by_task, summary_of
from vla_ros_lab.report import page
from vla_ros_lab.report.markup import Markup, significant, tag
from vla_ros_lab.report.versions import versions

EPISODES_WITH_VIDEO = 24
"""Episodes shown with a video; a hundred would make a file that no phone opens."""

COLUMNS = (
    "task",
    "success",
    "95 % interval",
    "episodes",
    "errors",
    "steps",
    "seconds",
    "held",
    "limited",
    "inference",
)
"""Headings of a summary."""


def cells(found: Summary) -> tuple[str, ...]:
    """Return the cells of a summary, all but the task's."""
    return (
        f"{100 * found.rate:.1f} %" if found.episodes > found.errors else "–",
        f"{100 * found.low:.1f} – {100 * found.high:.1f}",
        str(found.episodes),
        str(found.errors),
        significant(found.steps),
        significant(found.seconds),
        f"{100 * found.held:.1f} %",
        f"{100 * found.limited:.1f} %",
        f"{significant(found.inference_ms)} ms",
    )


def write_scores(
    scores: Sequence[Score], name: str, settings: Mapping[str, Any], published: str, path: Path
) -> None:
    save_text(path, render_scores(scores, name, settings, published))


def render_scores(scores: Sequence[Score], name: str, settings: Mapping[str, Any], published: str = "") -> str:
    whole = summary_of(scores)
    ordered = sorted(scores, key=lambda score: (score.success is None, bool(score.success)))
    shown = [score for score in ordered if score.video and Path(score.video).exists()][:EPISODES_WITH_VIDEO]
    rows = [[task, *cells(summary_of(each))] for task, each in by_task(scores).items()]
    good = whole.episodes - whole.errors
    level = "good" if whole.rate >= 0.9 else "warn" if whole.rate >= 0.5 else "bad"
    reasons = [f"95 % interval {100 * whole.low:.1f} to {100 * whole.high:.1f} % (Wilson)", published]
    reasons += [f"{whole.errors} episodes ended in an error and count neither way"] if whole.errors else []
    steps = (
        f"{100 * whole.limited:.2f} % of the steps were changed by a limit, {100 * whole.held:.2f} % were held and"
    )
    notes = f"{steps} {100 * whole.refused:.2f} % refused; in all others the action is the policy's."
    cards = [_card(score) for score in shown]
    body = [
        page.verdict(level, f"{whole.successes} of {good} episodes succeeded.", list(filter(None, reasons))),
        page.section("Tasks", page.table(COLUMNS, [*rows, ["total", *cells(whole)]]), notes),
        page.section("Videos", page.cards(cards) if cards else "None: PyAV is not installed.", "Failures first."),
        page.section("Episodes", page.table(("task", "state", "outcome", "steps", "held", "limited", "note"), [
            (score.task, score.state, _outcome(score), score.steps, score.held, score.limited, score.error or "–")
            for score in ordered
        ])),
        page.section("Settings and versions", page.facts({**settings, **versions()})),
    ]  # fmt: skip
    lead = f"{whole.episodes} episodes, {settings['mode'].replace('_', ' ')}"
    return page.document(f"vla_ros eval: {name}", lead, body, "Written by vla-ros eval --report.")


def _outcome(score: Score) -> Markup:
    name, level = ("error", "warn") if score.success is None else ("success", "good")
    if score.success is False:
        name, level = "failure", "bad"
    return tag("span", name, class_=f"flag {level}")


def _card(score: Score) -> Markup:
    data = base64.b64encode(Path(score.video).read_bytes()).decode()
    film = tag("video", "", src=f"data:video/mp4;base64,{data}", controls=True, preload="metadata", width=256)
    caption = tag("figcaption", f"{score.instruction}: state {score.state}, {score.steps} steps")
    return tag("figure", [tag("h3", [f"{score.task} ", _outcome(score)]), film, caption])
