"""Measures inference time against plain PyTorch and against the machine's own limits.

The baselines, over the same weights and images in the same run, are transformers' eager generate and a static KV
cache under torch.compile with CUDA graphs. --model tiny needs no checkpoint and runs on a CPU in under a minute; it
only shows that everything works.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_ros.config import load
from vla_ros.config.show import add_config_arguments
from vla_ros.errors import VlaRosError

if TYPE_CHECKING:
    from vla_ros.bench.measure import Measurement
    from vla_ros.engine.executor import Answer
    from vla_ros.types import UInt8Array

MOST_DRAFTED = 200
"""Steps of each pass with drafts: plain decoding needs many for its p99, these need not make the run longer."""

MOST_BASELINE = 200
"""Steps of the plain path where none are asked for: on a GPU it takes five times as long as the engine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``vla-ros bench``."""
    add_config_arguments(parser)
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="time any installed policy instead, with options from --config and -p; no baseline",
    )
    parser.add_argument(
        "--model",
        default="tiny",
        help="tiny, openvla-7b, tiny-oft, openvla-oft-7b, openvla-oft-7b-aloha, pi0, pi05 (random weights) or a "
        "checkpoint's folder",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4", "fp8"))
    parser.add_argument("--steps", type=int, default=0, help="measured steps; 0: 200 on a GPU, 3 on a CPU")
    parser.add_argument("--prompt-tokens", type=int, default=22, help="tokens of the prompt, without patches")
    parser.add_argument("--images", type=int, default=3, help="pi0, pi05: cameras")
    parser.add_argument("--horizon", type=int, default=50, help="pi0, pi05: actions in a chunk")
    parser.add_argument("--flow-steps", type=int, default=10, help="pi0, pi05: Euler steps")
    parser.add_argument(
        "--frame", metavar="WxH", help="camera's frames; 1280x720 on a GPU, 320x240 on a CPU; pi0, pi05: 640x480"
    )
    parser.add_argument(
        "--no-baseline", action="store_true", help="skip the baselines, and keep no weights for them"
    )
    parser.add_argument("--no-compiled", action="store_true", help="skip the baseline under torch.compile")
    parser.add_argument(
        "--baseline-steps", type=int, default=0, metavar="N",
        help=f"steps of each baseline, with which tokens are compared; 0: --steps, {MOST_BASELINE} at most",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures; '-' prints them instead of a table"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a profile of three steps for ui.perfetto.dev"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, then print or write the figures."""
    for option, path in (("--json", arguments.json), ("--trace", arguments.trace)):
        # Check before minutes of measuring; the profiler would only warn.
        if path is not None and str(path) != "-" and not os.access(path.parent, os.W_OK):
            raise VlaRosError(f"{option} {path}: cannot be written; check that {path.parent} is a writable folder")
    # Check the numbers before importing torch, which takes seconds.
    if arguments.steps < 0 or arguments.baseline_steps < 0 or arguments.prompt_tokens < 2:
        raise VlaRosError(
            f"--steps {arguments.steps} --baseline-steps {arguments.baseline_steps} --prompt-tokens "
            f"{arguments.prompt_tokens}: expected at least one step (0: the usual number) and two tokens"
        )
    if arguments.policy:
        from vla_ros.bench.policy import bench_policy, render

        config = load(arguments.config, [f"policy.name:={arguments.policy}", *arguments.param])
        result = bench_policy(config, arguments.steps or 20, _progress())
    elif "oft" in arguments.model and not Path(arguments.model).is_dir():
        from vla_ros.bench.oft import bench_oft, render

        result = bench_oft(arguments)
    elif arguments.model in ("pi0", "pi05"):
        from vla_ros.bench.pi import bench as bench_pi
        from vla_ros.bench.pi import render

        result = bench_pi(arguments, _frame_size(arguments.frame) if arguments.frame else None)
    else:
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
    """Run the measurement described by ``arguments`` and return one dictionary.

    Raises:
        ConfigError: An option does not fit this machine.
        CheckpointError: The model cannot be read.
        MissingDependencyError: torch or transformers is not installed.
    """
    size = _frame_size(arguments.frame) if arguments.frame else None
    try:
        import torch
    except ImportError as error:
        from vla_ros.errors import MissingDependencyError

        raise MissingDependencyError("bench needs torch: pip install 'vla_ros[openvla]'") from error

    from vla_ros.bench.inputs import make_messages, make_prompt
    from vla_ros.bench.machine import floor_ms, measure_machine, memory_gb
    from vla_ros.bench.measure import Measurement, run_right_drafts
    from vla_ros.bench.models import open_subject
    from vla_ros.bench.report import summarize
    from vla_ros.bench.times import percentiles
    from vla_ros.policies.openvla.build_engine import make_engine
    from vla_ros.policies.openvla.choices import choose_device
    from vla_ros.policies.openvla.loading import build_empty
    from vla_ros.policies.openvla.memory import plan_memory

    device = choose_device(arguments.device)
    cuda = device.type == "cuda"
    type_name = arguments.dtype if arguments.dtype != "auto" else ("bfloat16" if cuda else "float32")
    dtype = getattr(torch, type_name)
    steps, warmup = arguments.steps or (200 if cuda else 3), 20 if cuda else 1
    height, width = size or ((720, 1280) if cuda else (240, 320))

    machine = measure_machine(device, dtype)
    began = time.perf_counter()
    baseline_wanted = not arguments.no_baseline
    quantize_now = arguments.quantization if not baseline_wanted else "none"  # baselines need the dense weights
    subject = open_subject(arguments.model, device, dtype, quantize_now, _progress())
    model, count = subject.model, subject.statistics.dimension
    engine = make_engine(
        model, count, arguments.quantization, "prefill", keep=baseline_wanted, weights=subject.weights
    )
    shapes = {name: tuple(one.shape) for name, one in build_empty(model.architecture).named_parameters()}
    planned = plan_memory(shapes, model.architecture, type_name, arguments.quantization, str(device))
    print("plan:", planned, file=sys.stderr)
    loaded = time.perf_counter()
    prompt = make_prompt(model.architecture, arguments.prompt_tokens)
    measurement = Measurement(subject, engine, make_messages(height, width), steps, prompt)
    engine.warm_up([len(prompt)])
    measurement.run(which=[0])
    first = time.perf_counter()
    engine.wait()  # for the graph of frames of this size, so that only steady state is measured

    if arguments.trace is not None:
        with _profile(arguments.trace, cuda):
            measurement.run(which=range(min(3, steps)))
    times, answers = measurement.run(warmup=warmup)
    drafted = min(steps, MOST_DRAFTED)
    right = run_right_drafts(measurement, answers, drafted, warmup)
    temporal, tried = measurement.run([answers[i - 1].tokens for i in range(steps)], which=range(drafted))

    compared = min(arguments.baseline_steps or MOST_BASELINE, steps) if baseline_wanted else 0
    baseline = _baselines(measurement, answers, compared, min(warmup, 5), not arguments.no_compiled)
    sequence = model.architecture.patches + len(prompt)
    floors = [floor_ms(machine, model, engine.weights, sequence, passes) for passes in (count - 1, 0)]
    rates = [answer.accepted for answer in tried if answer.accepted is not None]
    details = {
        "dtype": type_name,
        "quantization": arguments.quantization,
        "graphs": "CUDA graphs" if cuda else "no graphs (CPU)",
        "memory_gb": memory_gb(device),
        "load_s": loaded - began,
        "first_action_s": first - began,
        "draft_acceptance": sum(rates) / ((count - 1) * len(rates)) if rates and count > 1 else 0.0,
        "drafted_ms": percentiles(temporal["total"]),
        "drafted_tokens_equal": right.equal
        and all((plain.tokens == other.tokens).all() for plain, other in zip(answers, tried, strict=False)),
        "guard": engine.guard,
        "prompt_tokens": len(prompt),
        "frame": [width, height],
        "capture_failures": {length: str(error) for length, error in engine.failures().items()},
    }
    engine.close()
    return summarize(subject, machine, times, right, (floors[0], floors[1]), {**baseline, **details})


def _baselines(
    measurement: Measurement, answers: list[Answer], steps: int, warmup: int, compiled: bool
) -> dict[str, Any]:
    """Time the baselines over the first ``steps`` messages and compare eager ``generate``'s tokens."""
    found: dict[str, Any] = {
        "baseline_ms": None, "tokens_equal": None, "token_match": None, "mismatch_margins": [],
        "baseline_steps": steps,
        "compiled_ms": None, "compiled_token_match": None, "compiled_left_out": "not asked for",
    }  # fmt: skip
    if not steps:
        return found
    import numpy as np

    from vla_ros.bench import baselines
    from vla_ros.bench.measure import compare
    from vla_ros.engine.llama import as_loaded

    engine, model, prompt = measurement.engine, measurement.subject.model, measurement.prompt
    count = measurement.subject.statistics.dimension

    def image(index: int) -> UInt8Array:
        # The engine's own resized image: what is compared is the network.
        return engine.resized(measurement.image(measurement.message(index)))

    eager = baselines.eager_generate(model, prompt, count)
    times, tokens = baselines.time_baseline(eager, image, steps, warmup)
    found.update(compare(answers[:steps], tokens), baseline_ms=float(np.median(times)))
    if compiled and model.device.type != "cuda":
        found["compiled_left_out"] = baselines.NO_GRAPHS
    elif compiled:
        dense = engine.weights.layers[0].qkv.kind == "dense"
        weights = engine.weights if dense else as_loaded(model.language_model)
        try:
            answer = baselines.compiled_static_cache(model, weights, prompt, count)
            times, tokens = baselines.time_baseline(answer, image, steps, warmup)
        except Exception as error:  # torch has a type for each; the engine's figures remain valid
            found["compiled_left_out"] = f"torch.compile failed: {type(error).__name__}: {str(error).strip()[:300]}"
        else:
            matched = compare(answers[:steps], tokens)["token_match"]
            found.update(compiled_ms=float(np.median(times)), compiled_token_match=matched, compiled_left_out=None)
    return found


def _frame_size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit() and int(width) and int(height)):
        raise VlaRosError(f"--frame {text}: expected WIDTHxHEIGHT in pixels, such as 1280x720")
    return int(height), int(width)


def _progress() -> Any:
    from vla_ros.policies.base import no_progress

    if not sys.stderr.isatty():
        return no_progress
    from vla_ros.node.run import loading_bar

    return loading_bar()


def _profile(path: Path, cuda: bool) -> AbstractContextManager[Any]:
    """A profiler that writes a Chrome trace, which Perfetto reads."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    return profile(activities=activities, on_trace_ready=lambda done: done.export_chrome_trace(str(path)))
