"""The figures as JSON and as a table."""

from __future__ import annotations

import platform
import statistics
from typing import Any

import torch

from vla_ros.bench.machine import Machine
from vla_ros.bench.measure import RightDrafts
from vla_ros.bench.models import Subject
from vla_ros.bench.times import Times, between, median_of, percentiles, stage_medians

IN_AND_OUT = ("upload", "preprocess", "download", "post")
"""Stages that are neither the message's way nor the network."""


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
    total, base, compiled = percentiles(times["total"]) or {}, details["baseline_ms"], details["compiled_ms"]
    accepted = percentiles(right.accepted["total"])
    result: dict[str, Any] = {
        "model": subject.name,
        "random_weights": subject.random,
        "machine": machine.name,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "total_ms": total,
        "stages_ms": stage_medians(times),
        "in_and_out_ms": median_of(times, *IN_AND_OUT),
        "between_ms": between(times),
        "accepted_ms": accepted,
        "accepted_stages_ms": stage_medians(right.accepted),
        "accepted_steps": len(right.accepted["total"]),
        "accepted_images": right.images,
        "accepted_share": right.share,
        "verified_ms": percentiles(right.verified["total"]),
        "verified_steps": len(right.verified["total"]),
        "speedup": None if base is None else base / total["p50"],
        "compiled_speedup": None if compiled is None else compiled / total["p50"],
        "accepted_speedup": None if base is None or accepted is None else base / accepted["p50"],
        "floor_ms": floors[0],
        "accepted_floor_ms": floors[1],
        "share_of_floor": floors[0] / total["p50"],
        "bandwidth_gb_per_s": machine.bytes_per_s / 1e9,
        "tflops": machine.flops_per_s / 1e12,
        "steps": len(times["total"]),
        **details,
    }
    rounded: dict[str, Any] = _rounded(result)
    return rounded


def render(result: dict[str, Any]) -> str:
    """The table that ``vla-ros bench`` prints."""
    plain, drafted, accepted = result["stages_ms"], result["accepted_stages_ms"], result["accepted_ms"] or {}
    width, height = result["frame"]
    lines = [
        f"{result['model']} on {result['machine']}, {result['dtype']}, quantisation {result['quantization']}, "
        f"{result['steps']} steps, {result['graphs']}",
        _row("stage (p50, ms)", "plain", "draft accepted"),
        *(_row(name, plain[name], drafted.get(name)) for name in plain),
        _row("between stages", result["between_ms"]),
        *(_row(f"total {name}", result["total_ms"][name], accepted.get(name)) for name in ("p50", "p99")),
        _row("in and out", result["in_and_out_ms"]) + f"   ({width}x{height}: {', '.join(IN_AND_OUT)})",
        _row("floor", result["floor_ms"], result["accepted_floor_ms"]),
        *_baseline_lines(result),
        f"measured: copy {result['bandwidth_gb_per_s']:.0f} GB/s, product {result['tflops']:.2f} TFLOP/s; "
        f"memory {result['memory_gb']:.2f} GB; load {result['load_s']:.1f} s, "
        f"first action after {result['first_action_s']:.1f} s",
        *_draft_lines(result),
    ]
    return "\n".join(lines)


def _baseline_lines(result: dict[str, Any]) -> list[str]:
    if result["baseline_ms"] is None:
        return []
    eager = f"   (transformers generate, eager: {result['baseline_ms']:.2f} ms, {result['baseline_steps']} steps)"
    equal, compiled = "equal", result["compiled_left_out"]
    if margins := result["mismatch_margins"]:
        equal = f"{len(margins)} answers differ, first where the best logit is ahead by at most {max(margins):.3f} "
        equal += f"(median {statistics.median(margins):.3f})"
    if compiled is None:
        times = f"{result['compiled_speedup']:.2f}"
        compiled = f"{result['compiled_ms']:.2f} ms, the engine is {times} times as fast"
    return [
        _row("times baseline", result["speedup"], result["accepted_speedup"]) + eager,
        f"tokens: {equal}; match {100 * result['token_match']:.2f} %",
        f"static KV cache, torch.compile, CUDA graphs: {compiled}",
    ]


def _draft_lines(result: dict[str, Any]) -> list[str]:
    """Explain the draft figures and the steps behind them."""
    sure = f"whose plain answer is ahead by more than the guard ({result['guard']:g} logits) at every drafted token"
    steps, images = f"{result['accepted_steps']} steps", f"{result['steps']} images"
    accepted = f"{steps} with {result['accepted_images']} of {images}, {sure}"
    if not result["accepted_steps"]:
        accepted = f"not measured, as none of {images} is one {sure} and whose draft was accepted in full"
    others = (
        f"; the others need a pass: p50 {result['verified_ms']['p50']:.3f} ms" if result["verified_steps"] else ""
    )
    basis = "random images"
    if result["random_weights"]:
        basis = "random weights and images, which says nothing about a robot"
    return [
        f"draft accepted: {accepted}",
        f"right drafts, unselected images: {100 * result['accepted_share']:.1f} % accepted in full{others}",
        f"drafts of the previous action: {100 * result['draft_acceptance']:.1f} % of tokens accepted on {basis}",
    ]


def _row(name: str, *values: float | str | None) -> str:
    cells = ["-" if one is None else one if isinstance(one, str) else f"{one:.3f}" for one in values]
    return f"{name:<18}" + "".join(f"{cell:>{size}}" for cell, size in zip(cells, (10, 16), strict=False))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 5) if isinstance(value, float) else value
