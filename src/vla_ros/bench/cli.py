"""Measure how fast this machine answers, against the plain path with the same weights and against its own limits.

The plain path is transformers' eager generate over the same weights and the same pictures, in the same run.
--model tiny needs no checkpoint and runs on a CPU in under a minute; its figures say that all works, no more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_ros.errors import VlaRosError

if TYPE_CHECKING:
    from vla_ros.bench.models import Subject
    from vla_ros.types import IntArray


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``vla-ros bench``."""
    parser.add_argument(
        "--model", default="tiny", help="tiny, openvla-7b (random weights) or a checkpoint's folder"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "nf4"))
    parser.add_argument("--steps", type=int, default=0, help="measured steps; 0: 200 on a GPU, 3 on a CPU")
    parser.add_argument("--prompt-tokens", type=int, default=22, help="tokens of the prompt, without patches")
    parser.add_argument("--frame", metavar="WxH", help="camera's frames; 1280x720 on a GPU, 320x240 on a CPU")
    parser.add_argument(
        "--no-baseline", action="store_true", help="skip the plain path, and keep no weights for it"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures; '-' prints them instead of a table"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a profile of three steps for ui.perfetto.dev"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, write."""
    for option, path in (("--json", arguments.json), ("--trace", arguments.trace)):
        # Before minutes of measuring; and the profiler would only warn.
        if path is not None and str(path) != "-" and not os.access(path.parent, os.W_OK):
            raise VlaRosError(
                f"{option} {path}: cannot be written; is {path.parent} a folder that you may write to?"
            )
    result = bench(arguments)
    from vla_ros.bench.report import render

    text = json.dumps(result, indent=2)
    if arguments.json is not None and str(arguments.json) == "-":
        print(text)
        return 0
    print(render(result))
    if arguments.json is not None:
        try:
            arguments.json.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise VlaRosError(f"--json {arguments.json}: cannot be written ({error.strerror})") from None
    return 0


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """The measurement that ``arguments`` describe, as one dictionary.

    Raises:
        ConfigError: An option does not fit this machine.
        CheckpointError: The model cannot be read.
        MissingDependencyError: torch or transformers is not installed.
    """
    try:
        import torch
    except ImportError as error:
        from vla_ros.errors import MissingDependencyError

        raise MissingDependencyError("bench needs torch: pip install 'vla_ros[openvla]'") from error

    from vla_ros.bench.machine import floor_ms, measure_machine, memory_gb
    from vla_ros.bench.measure import Trip, compare, run_baseline, run_engine
    from vla_ros.bench.models import eager_baseline, open_quantized, open_subject
    from vla_ros.bench.report import summarize
    from vla_ros.engine.memory import plan
    from vla_ros.policies.openvla.choices import choose_device
    from vla_ros.policies.openvla.fast import make_engine
    from vla_ros.types import CameraFrame
    from vla_ros.vision.decode import decode_image

    device = choose_device(arguments.device)
    cuda = device.type == "cuda"
    name = arguments.dtype if arguments.dtype != "auto" else ("bfloat16" if cuda else "float32")
    steps = arguments.steps or (200 if cuda else 3)
    warmup = 20 if cuda else 1
    if steps < 1 or arguments.prompt_tokens < 2:
        raise VlaRosError(
            f"--steps {arguments.steps} --prompt-tokens {arguments.prompt_tokens}: expected at least one step (0: "
            "the usual number) and two tokens"
        )
    height, width = _frame_size(arguments.frame or ("1280x720" if cuda else "320x240"))

    machine = measure_machine(device, getattr(torch, name))
    began = time.perf_counter()
    baseline_wanted, dtype = not arguments.no_baseline, getattr(torch, name)
    if arguments.quantization != "none" and not baseline_wanted:
        subject = open_quantized(arguments.model, device, dtype, arguments.quantization)
    else:
        subject = open_subject(arguments.model, device, dtype, _progress())
    count = subject.statistics.dimension
    engine = make_engine(
        subject.model, count, arguments.quantization, "prefill", keep=baseline_wanted, weights=subject.weights
    )
    print(plan(engine.weights, engine.buckets, subject.model), file=sys.stderr)
    loaded = time.perf_counter()
    messages, prompt = _inputs(subject, steps, height, width, arguments.prompt_tokens)
    engine.warm_up([len(prompt)])
    trip = Trip(subject, engine)
    trip.step(messages[0], prompt, None)
    first = time.perf_counter()

    with _profile(arguments.trace, cuda):
        if arguments.trace is not None:
            run_engine(trip, messages[:3], prompt, [None], 0)
    times, answers = run_engine(trip, messages, prompt, [None], warmup)
    accepted, repeated = run_engine(trip, messages, prompt, [answer.tokens for answer in answers], warmup)
    previous = [answers[index - 1].tokens for index in range(len(answers))]
    temporal, tried = run_engine(trip, messages, prompt, previous, 0)
    drafts_equal = all((a.tokens == b.tokens).all() and (a.tokens == c.tokens).all()
                       for a, b, c in zip(answers, repeated, tried, strict=True))  # fmt: skip

    agreement: dict[str, Any] = {"tokens_equal": None, "token_match": None, "mismatch_margins": []}
    baseline: list[float] | None = None
    if baseline_wanted:
        images = [engine.resized(CameraFrame(decode_image(message).image)) for message in messages]
        baseline, tokens = run_baseline(
            subject, eager_baseline(subject.model), images, prompt, count, min(warmup, 5)
        )
        agreement = compare(answers, tokens)
    sequence = subject.model.architecture.patches + len(prompt)
    floors = tuple(floor_ms(machine, subject.model, engine.weights, sequence, passes) for passes in (count - 1, 0))
    rates = [answer.accepted or 0 for answer in tried if answer.accepted is not None]
    details = {
        "dtype": name,
        "quantization": arguments.quantization,
        "graphs": "CUDA graphs" if cuda else "no graphs (CPU)",
        "memory_gb": memory_gb(device),
        "load_s": loaded - began,
        "first_action_s": first - began,
        "draft_acceptance": sum(rates) / ((count - 1) * len(rates)) if rates and count > 1 else 0.0,
        "drafted_ms": {"p50": temporal.percentile(50), "p99": temporal.percentile(99)},
        "drafted_tokens_equal": drafts_equal,
        "prompt_tokens": len(prompt),
        "frame": [width, height],
        "capture_failures": {length: str(error) for length, error in engine.failures().items()},
    }
    engine.close()
    return summarize(subject, machine, times, accepted, baseline, agreement, (floors[0], floors[1]), details)


def _inputs(
    subject: Subject, count: int, height: int, width: int, prompt_tokens: int
) -> tuple[list[bytes], IntArray]:
    """Messages with random frames, never zeros: zeros run faster than real data. A prompt of random words."""
    import numpy as np

    from vla_ros.vision.messages import encode_image

    rng = np.random.default_rng(0)
    base = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    frames = [np.roll(base, 7 * index, axis=1) for index in range(min(count, 32))]
    messages = [encode_image(frame, index, "camera") for index, frame in enumerate(frames)]
    architecture = subject.model.architecture
    words = rng.integers(3, architecture.action_vocab_size // 2, max(1, prompt_tokens - 2))
    prompt = np.array([architecture.llm.bos_token, *words, architecture.empty_token], dtype=np.int64)
    return [messages[index % len(messages)] for index in range(count)], prompt


def _frame_size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit() and int(width) and int(height)):
        raise VlaRosError(f"--frame {text}: expected WIDTHxHEIGHT in pixels, such as 1280x720")
    return int(height), int(width)


def _progress() -> Any:
    from vla_ros.policies.base import no_progress

    if not sys.stderr.isatty():
        return no_progress
    from vla_ros.run import loading_bar

    return loading_bar()


def _profile(path: Path | None, cuda: bool) -> AbstractContextManager[Any]:
    """A profiler that writes a Chrome trace, which Perfetto reads; nothing where no path is given."""
    if path is None:
        return nullcontext()
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    return profile(activities=activities, on_trace_ready=lambda done: done.export_chrome_trace(str(path)))
