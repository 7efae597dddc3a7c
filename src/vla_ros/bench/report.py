"""The figures as JSON and as a table."""

from __future__ import annotations

import platform
import statistics
from typing import Any

import torch

from vla_ros.bench.machine import Machine
from vla_ros.bench.measure import IN_AND_OUT, RightDrafts, Times
from vla_ros.bench.models import Subject


def summarize(
    subject: Subject,
    machine: Machine,
    times: Times,
    right: RightDrafts,
    floors: tuple[float, float],
    details: dict[str, Any],
) -> dict[str, Any]:
    """Return all figures as plain numbers, in milliseconds and gigabytes.

    Args:
        subject: What was measured.
        machine: On what.
        times: Plain decoding.
        right: With drafts that are right.
        floors: Without and with accepted drafts.
        details: Further entries, the baselines among them.
    """
    total, base, compiled = times.percentile(50), details["baseline_ms"], details["compiled_ms"]
    accepted = right.accepted.percentiles()
    result: dict[str, Any] = {
        "model": subject.name,
        "random_weights": subject.random,
        "machine": machine.name,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "total_ms": {"p50": total, "p99": times.percentile(99)},
        "stages_ms": times.medians(),
        "in_and_out_ms": times.together(*IN_AND_OUT),
        "between_ms": times.between(),
        "accepted_ms": accepted,
        "accepted_stages_ms": right.accepted.medians(),
        "accepted_steps": len(right.accepted.total),
        "accepted_pictures": right.images,
        "accepted_share": right.share,
        "verified_ms": right.verified.percentiles(),
        "verified_steps": len(right.verified.total),
        "speedup": None if base is None else base / total,
        "compiled_speedup": None if compiled is None else compiled / total,
        "accepted_speedup": None if base is None or accepted is None else base / accepted["p50"],
        "floor_ms": floors[0],
        "accepted_floor_ms": floors[1],
        "share_of_floor": floors[0] / total,
        "bandwidth_gb_per_s": machine.bytes_per_s / 1e9,
        "tflops": machine.flops_per_s / 1e12,
        "steps": len(times.total),
        **details,
    }
    rounded: dict[str, Any] = _rounded(result)
    return rounded


def render(result: dict[str, Any]) -> str:
    """The table that ``vla-ros bench`` prints."""
    plain, drafted, accepted = result["stages_ms"], result["accepted_stages_ms"], result["accepted_ms"] or {}
    lines = [
        f"{result['model']} on {result['machine']}, {result['dtype']}, quantisation {result['quantization']}, "
        f"{result['steps']} steps, {result['graphs']}",
        _row("stage (p50, ms)", "plain", "draft accepted"),
    ]
    lines += [_row(name, plain[name], drafted.get(name)) for name in plain]
    lines.append(_row("between stages", result["between_ms"]))
    lines += [_row(f"total {name}", result["total_ms"][name], accepted.get(name)) for name in ("p50", "p99")]
    width, height = result["frame"]
    lines.append(_row("in and out", result["in_and_out_ms"]) + f"   ({width}x{height}: {', '.join(IN_AND_OUT)})")
    lines.append(_row("floor", result["floor_ms"], result["accepted_floor_ms"]))
    if result["baseline_ms"] is not None:
        lines.append(
            _row("times baseline", result["speedup"], result["accepted_speedup"])
            + f"   (transformers generate, eager: {result['baseline_ms']:.2f} ms, {result['baseline_steps']} steps)"
        )
        margins = result["mismatch_margins"]
        equal = "equal" if not margins else (
            f"{len(margins)} answers differ, first where the best logit is ahead by at most {max(margins):.3f} "
            f"(median {statistics.median(margins):.3f})"
        )  # fmt: skip
        lines.append(f"tokens: {equal}; match {100 * result['token_match']:.2f} %")
        compiled = result["compiled_left_out"] or (
            f"{result['compiled_ms']:.2f} ms, the engine is {result['compiled_speedup']:.2f} times as fast"
        )
        lines.append(f"static KV cache, torch.compile, CUDA graphs: {compiled}")
    lines.append(
        f"measured: copy {result['bandwidth_gb_per_s']:.0f} GB/s, product {result['tflops']:.2f} TFLOP/s; "
        f"memory {result['memory_gb']:.2f} GB; load {result['load_s']:.1f} s, "
        f"first action after {result['first_action_s']:.1f} s"
    )
    return "\n".join(lines + _of_drafts(result))


def _of_drafts(result: dict[str, Any]) -> list[str]:
    """Explain the draft figures and the steps behind them."""
    sure = f"whose plain answer is ahead by more than the guard ({result['guard']:g} logits) at every drafted token"
    if result["accepted_steps"]:
        accepted = (
            f"draft accepted: {result['accepted_steps']} steps with {result['accepted_pictures']} of "
            f"{result['steps']} images, {sure}"
        )
    else:
        accepted = f"draft accepted: not measured, as none of {result['steps']} images has an answer that was "
        accepted += f"accepted as a whole: one {sure}"
    others = "" if not result["verified_steps"] else (
        f"; the others take a pass: p50 {result['verified_ms']['p50']:.3f} ms"
    )  # fmt: skip
    of_what = (
        "random weights and images, which says nothing of a robot" if result["random_weights"] else "random images"
    )
    return [
        accepted,
        f"right drafts, images as they come: {100 * result['accepted_share']:.1f} % accepted as a whole{others}",
        f"drafts of the previous action: {100 * result['draft_acceptance']:.1f} % of tokens accepted on {of_what}",
    ]


def _row(name: str, *values: float | str | None) -> str:
    cells = ["-" if one is None else one if isinstance(one, str) else f"{one:.3f}" for one in values]
    return f"{name:<18}" + "".join(f"{cell:>{size}}" for cell, size in zip(cells, (10, 16), strict=False))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 5) if isinstance(value, float) else value
