"""Times OpenVLA from a camera message to an action, with and without drafts: ``python -m benchmarks.models``."""

import argparse
import statistics
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models import baselines
from benchmarks.models.machine import floor_ms, openvla_stages
from benchmarks.models.measure import Measurement, RightDrafts, compare, run_right_drafts
from benchmarks.models.report import footing, heading, share_rows
from benchmarks.models.setup import COMPILED_UNUSED, IN_AND_OUT, Arrivals, compiled_baseline, figures, start
from benchmarks.models.subject import make_prompt, open_subject
from vla_ros.types import UInt8Array
from vla_ros_lab.bench.times import make_messages, percentiles, row, stage_medians
from vla_ros_models.engine.token_engine import EngineResult
from vla_ros_models.engine.weights import as_loaded
from vla_ros_models.openvla.inference import fit_guard, make_engine
from vla_ros_models.openvla.loading import build_empty, plan_memory

MOST_DRAFTED = 200
"""Most steps of a run with drafts; plain decoding runs all, for its p99."""

MOST_BASELINE = 200
"""Steps of a baseline unless given; on a GPU each takes five times as long as the engine's."""


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    setup = start(arguments)
    height, width = arguments.frame or ((720, 1280) if setup.cuda else (240, 320))
    steps, kept = setup.steps, not arguments.no_baseline  # baselines need the dense weights
    quantize_now = "none" if kept else setup.quantization
    subject = open_subject(arguments.model, setup.device, setup.dtype, quantize_now)
    model, count = subject.model, subject.statistics.dimension
    engine = make_engine(model, count, setup.quantization, "prefill", keep=kept, weights=subject.weights)
    shapes = {name: tuple(one.shape) for name, one in build_empty(model.architecture).named_parameters()}
    planned = plan_memory(shapes, model.architecture, setup.dtype_name, setup.quantization, str(setup.device))
    print("plan:", planned, file=sys.stderr)
    loaded = time.perf_counter()
    prompt = make_prompt(model.architecture, arguments.prompt_tokens)
    arrivals = Arrivals(engine, make_messages(height, width), 4)
    measurement = Measurement(subject, engine, arrivals, steps, prompt)
    engine.warm_up([len(prompt)])
    measurement.run(which=[0])
    first = time.perf_counter()
    engine.wait()  # for the graph of frames of this size, so that only steady state is measured
    fit_guard(engine, [engine.resized(measurement.image(measurement.message(i))) for i in range(2)], prompt)

    if arguments.trace is not None:
        with _profile(arguments.trace, setup.cuda):
            measurement.run(which=range(min(3, steps)))
    times, answers = measurement.run(warmup=setup.warmup)
    drafted = min(steps, MOST_DRAFTED)
    right = run_right_drafts(measurement, answers, drafted, setup.warmup)
    temporal, tried = measurement.run([answers[i - 1].tokens for i in range(steps)], which=range(drafted))

    compared = setup.baseline_steps(arguments, MOST_BASELINE)
    baseline = _baselines(measurement, answers, compared, min(setup.warmup, 5), not arguments.no_compiled)
    sequence = model.architecture.patches + len(prompt)
    floors = [
        floor_ms(setup.machine, openvla_stages(model, engine.weights, sequence, passes))
        for passes in (count - 1, 0)
    ]
    same = all((plain.tokens == other.tokens).all() for plain, other in zip(answers, tried, strict=False))
    details = {
        **baseline,
        **_draft_figures(right, tried, baseline["baseline_ms"]),
        "model": subject.name,
        "random_weights": subject.random,
        "prompt_tokens": len(prompt),
        "frame": [width, height],
        "slot_ms": percentiles(np.array(arrivals.milliseconds)),
        "floor_ms": floors[0],
        "accepted_floor_ms": floors[1],
        "drafted_ms": percentiles(temporal["total"]),
        "drafted_tokens_equal": right.equal and same,
        "guard": engine.guard,
        "capture_failures": {length: str(error) for length, error in engine.failures().items()},
    }
    engine.close()
    return figures(setup, times, loaded, first, details)


def _draft_figures(right: RightDrafts, tried: list[EngineResult], base: float | None) -> dict[str, Any]:
    """Return the figures of right drafts, and the share of tokens that drafts of the previous image saved."""
    accepted = percentiles(right.accepted["total"])
    saved = [answer.accepted / max(1, len(answer.tokens) - 1) for answer in tried if answer.accepted is not None]
    return {
        "accepted_ms": accepted,
        "accepted_stages_ms": stage_medians(right.accepted),
        "accepted_steps": len(right.accepted["total"]),
        "accepted_share": right.share,
        "accepted_speedup": None if base is None or accepted is None else base / accepted["p50"],
        "verified_ms": percentiles(right.verified["total"]),
        "verified_steps": len(right.verified["total"]),
        "draft_acceptance": sum(saved) / len(saved) if saved else 0.0,
    }


def _baselines(
    measurement: Measurement, answers: list[EngineResult], steps: int, warmup: int, compiled: bool
) -> dict[str, Any]:
    """Time the baselines over the first ``steps`` messages and compare eager ``generate``'s tokens."""
    found: dict[str, Any] = {
        "baseline_ms": None, "tokens_equal": None, "token_match": None, "mismatch_margins": [],
        "baseline_steps": steps, "compiled_token_match": None, **COMPILED_UNUSED,
    }  # fmt: skip
    if not steps:
        return found
    engine, model, prompt = measurement.engine, measurement.subject.model, measurement.prompt
    count = measurement.subject.statistics.dimension

    def timed(answer: baselines.Answer) -> tuple[float, dict[str, Any]]:
        times, tokens = baselines.time_baseline(answer, image, steps, warmup)
        return float(np.median(times)), compare(answers[:steps], tokens)

    def image(index: int) -> UInt8Array:
        # The engine's own resized image: what is compared is the network.
        return engine.resized(measurement.image(measurement.message(index)))

    def run_compiled() -> dict[str, Any]:
        dense = engine.weights.layers[0].qkv.kind == "dense"
        weights = engine.weights if dense else as_loaded(model.language_model)
        median, compared = timed(baselines.compiled_static_cache(model, weights, prompt, count))
        return {"compiled_ms": median, "compiled_token_match": compared["token_match"]}

    median, compared = timed(baselines.eager_generate(model, prompt, count))
    found |= {**compared, "baseline_ms": median}
    return found | compiled_baseline(model.device, compiled, run_compiled)


def _profile(path: Path, cuda: bool) -> AbstractContextManager[Any]:
    """Return a profiler that writes a Chrome trace, which Perfetto reads."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    return profile(activities=activities, on_trace_ready=lambda done: done.export_chrome_trace(str(path)))


def render(result: dict[str, Any]) -> str:
    plain, drafted, accepted = result["stages_ms"], result["accepted_stages_ms"], result["accepted_ms"] or {}
    width, height = result["frame"]
    lines = [
        heading(result),
        row("stage (p50, ms)", "plain", "draft accepted"),
        *(row(name, plain[name], drafted.get(name)) for name in plain),
        row("between stages", result["between_ms"]),
        *share_rows(result),
        *(row(f"total {name}", result["total_ms"][name], accepted.get(name)) for name in ("p50", "p99")),
        row("in and out", result["in_and_out_ms"]) + f"   ({width}x{height}: {', '.join(IN_AND_OUT)})",
        row("floor", result["floor_ms"], result["accepted_floor_ms"]),
        *_baseline_lines(result),
        footing(result),
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
        row("times baseline", result["speedup"], result["accepted_speedup"]) + eager,
        f"tokens: {equal}; match {100 * result['token_match']:.2f} %",
        f"static KV cache, torch.compile, CUDA graphs: {compiled}",
    ]


def _draft_lines(result: dict[str, Any]) -> list[str]:
    """Explain the draft figures and the steps behind them."""
    basis = "random images"
    if result["random_weights"]:
        basis = "random weights and images, which says nothing about a robot"
    lines = [
        f"draft accepted: {result['accepted_steps']} steps whose draft the prefill predicts, whatever the margins",
        f"right drafts: the prefill accepts {100 * result['accepted_share']:.1f} %, those whose margins are all at "
        f"least {result['guard']:.2g}",
        f"drafts of the previous action: {100 * result['draft_acceptance']:.1f} % of tokens accepted on {basis}",
    ]
    if result["verified_steps"]:
        lines[1] += f"; the others need a pass: p50 {result['verified_ms']['p50']:.3f} ms"
    return lines
