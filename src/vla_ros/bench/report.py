"""The figures as JSON and as a table."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import torch

from vla_ros.bench.machine import Machine
from vla_ros.bench.measure import IN_AND_OUT, Times
from vla_ros.bench.models import Subject


def summarize(
    subject: Subject,
    machine: Machine,
    times: Times,
    accepted: Times,
    baseline: list[float] | None,
    agreement: dict[str, Any],
    floors: tuple[float, float],
    details: dict[str, Any],
) -> dict[str, Any]:
    """Everything that was measured, as plain numbers, milliseconds and gigabytes.

    Args:
        subject: What was measured.
        machine: On what.
        times: Plain decoding.
        accepted: With drafts that are right.
        baseline: Milliseconds of the plain path, or None.
        agreement: From :func:`~vla_ros.bench.measure.compare`.
        floors: Without and with accepted drafts.
        details: Further entries.
    """
    total, base = times.percentile(50), None if baseline is None else float(np.percentile(baseline, 50))
    result: dict[str, Any] = {
        "model": subject.name,
        "random_weights": subject.random,
        "machine": machine.name,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "total_ms": {"p50": total, "p99": times.percentile(99)},
        "stages_ms": times.medians(),
        "in_and_out_ms": times.together(*IN_AND_OUT),
        "accepted_ms": {"p50": accepted.percentile(50), "p99": accepted.percentile(99)},
        "accepted_stages_ms": accepted.medians(),
        "baseline_ms": base,
        "speedup": None if base is None else base / total,
        "accepted_speedup": None if base is None else base / accepted.percentile(50),
        "floor_ms": floors[0],
        "accepted_floor_ms": floors[1],
        "share_of_floor": floors[0] / total,
        "bandwidth_gb_per_s": machine.bytes_per_s / 1e9,
        "tflops": machine.flops_per_s / 1e12,
        "steps": len(times.total),
        **agreement,
        **details,
    }
    rounded: dict[str, Any] = _rounded(result)
    return rounded


def render(result: dict[str, Any]) -> str:
    """The table that ``vla-ros bench`` prints."""
    plain, drafted = result["stages_ms"], result["accepted_stages_ms"]
    lines = [
        f"{result['model']} on {result['machine']}, {result['dtype']}, quantisation {result['quantization']}, "
        f"{result['steps']} steps, {result['graphs']}",
        f"{'stage (p50, ms)':<18}{'plain':>10}{'draft accepted':>16}",
    ]
    lines += [
        f"{name:<18}{plain[name]:>10.3f}" + (f"{drafted[name]:>16.3f}" if name in drafted else f"{'-':>16}")
        for name in plain
    ]
    for name in ("p50", "p99"):
        lines.append(f"{'total ' + name:<18}{result['total_ms'][name]:>10.3f}{result['accepted_ms'][name]:>16.3f}")
    width, height = result["frame"]
    lines.append(
        f"{'in and out':<18}{result['in_and_out_ms']:>10.3f}   ({width}x{height}: {', '.join(IN_AND_OUT)})"
    )
    lines.append(f"{'floor':<18}{result['floor_ms']:>10.3f}{result['accepted_floor_ms']:>16.3f}")
    if result["baseline_ms"] is not None:
        lines.append(
            f"{'times baseline':<18}{result['speedup']:>10.2f}{result['accepted_speedup']:>16.2f}"
            f"   (transformers generate, eager: {result['baseline_ms']:.2f} ms)"
        )
        equal = "equal" if result["tokens_equal"] else f"not all equal, margins there {result['mismatch_margins']}"
        lines.append(f"tokens: {equal}; match {100 * result['token_match']:.2f} %")
    lines.append(
        f"measured: copy {result['bandwidth_gb_per_s']:.0f} GB/s, product {result['tflops']:.2f} TFLOP/s; "
        f"memory {result['memory_gb']:.2f} GB; load {result['load_s']:.1f} s, "
        f"first action after {result['first_action_s']:.1f} s"
    )
    lines.append(
        f"drafts of the previous action: {100 * result['draft_acceptance']:.1f} % of tokens accepted on "
        + (
            "random weights and pictures, which says nothing of a robot"
            if result["random_weights"]
            else "random pictures"
        )
    )
    return "\n".join(lines)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 5) if isinstance(value, float) else value
