"""Figures of episodes: success, wrong objects, and how well a step's tokens predict those of the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tools.train.controls import Control
from tools.train.rollouts import Rollout
from vla_ros.types import IntArray


def draft_acceptance(episodes: Sequence[IntArray]) -> dict[str, float]:
    """Acceptance of the previous step's tokens as a draft, for int64 [steps, 7] of each episode.

    Returns:
        ``tokens`` (share of equal tokens), ``leading`` (mean length of the accepted prefix) and ``whole`` (share of
        drafts accepted in full); empty if no episode had two steps.
    """
    equal = [tokens[1:] == tokens[:-1] for tokens in episodes if len(tokens) > 1]
    if not equal:
        return {}
    rows = np.concatenate(equal)
    leading = np.cumprod(rows, axis=1).sum(axis=1)
    return {
        "tokens": round(float(rows.mean()), 4),
        "leading": round(float(leading.mean()), 3),
        "whole": round(float(rows.all(axis=1).mean()), 4),
    }


def summarize(control: Control, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """One row of the table as plain JSON values."""
    won = [rollout for rollout in rollouts if rollout.success]
    rate = len(won) / len(rollouts)
    return {
        "name": control.name,
        "title": control.title,
        "options": list(control.options),
        "episodes": len(rollouts),
        "first_seed": rollouts[0].seed,
        "success_rate": rate,
        "wrong_object_rate": sum(rollout.reason == "wrong_object" for rollout in rollouts) / len(rollouts),
        "steps": round(float(np.mean([rollout.steps for rollout in won])), 1) if won else None,
        "expected": [control.at_least, control.at_most],
        "met": control.met(rate),
        "draft_acceptance": draft_acceptance([rollout.tokens for rollout in rollouts]),
        "failed_seeds": [rollout.seed for rollout in rollouts if not rollout.success][:20],
    }


HEADINGS = (
    *("control", "on", "episodes", "success", "wrong object", "steps", "expected"),
    "draft: tokens, leading, whole",
)


def row(figures: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table under :data:`HEADINGS`."""
    low, high = figures["expected"]
    wanted = f">= {low:.0%}" if low else f"<= {high:.0%}" if high < 1 else ""
    draft = figures.get("draft_acceptance") or {}
    return (
        figures["title"],
        figures.get("machine", ""),
        str(figures["episodes"]),
        f"{figures['success_rate']:.1%}",
        f"{figures['wrong_object_rate']:.1%}",
        "" if figures["steps"] is None else f"{figures['steps']:.1f}",
        wanted if figures["met"] else f"{wanted} MISSED",
        f"{draft['tokens']:.0%}, {draft['leading']:.1f}, {draft['whole']:.0%}" if draft else "",
    )


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table in Markdown."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *(row(figures) for figures in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
