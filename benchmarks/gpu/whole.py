"""Whole answers by ``vla-ros bench``, batches, and ten thousand steps."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from gpu.common import Session


def _bench(session: Session, quantization: str, steps: int, *options: str) -> dict[str, Any]:
    from vla_ros.bench.cli import add_arguments
    from vla_ros.bench.openvla import bench, render

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--model", session.name, "--device", str(session.device), "--quantization", quantization, *options]
    result = bench(parser.parse_args([*words, "--steps", str(2 if session.dry else steps)]))
    print(render(result))
    return result


def stage_bf16(session: Session) -> dict[str, Any]:
    """Return the 7B model in bfloat16 against both baselines."""
    return _bench(session, "none", 1000)


def stage_int8(session: Session) -> dict[str, Any]:
    """Return the 7B in int8."""
    return _bench(session, "int8", 300, "--no-baseline")


def stage_int4(session: Session) -> dict[str, Any]:
    """Return the 7B in 4 bits."""
    return _bench(session, "int4", 300, "--no-baseline")


def stage_fp8(session: Session) -> dict[str, Any]:
    """Return the 7B in FP8."""
    return _bench(session, "fp8", 300, "--no-baseline")


def stage_oft(session: Session) -> dict[str, Any]:
    """OpenVLA-OFT for LIBERO and ALOHA, in bfloat16 and FP8, each beside eager torch."""
    from vla_ros.bench.cli import add_arguments
    from vla_ros.bench.oft import MODELS, bench, render

    parser, result = argparse.ArgumentParser(), {}
    add_arguments(parser)
    for name in ("tiny-oft",) if session.dry else [name for name in MODELS if "7b" in name]:
        for kind in ("none", "fp8"):
            words = ["--model", name, "--device", str(session.device), "--quantization", kind]
            words += ["--steps", "2" if session.dry else "200", "--baseline-steps", "2" if session.dry else "30"]
            result[f"{name} {kind}"] = found = bench(parser.parse_args(words))
            print(render(found), flush=True)
            if not session.dry:
                session.torch.cuda.empty_cache()
    return result


def stage_batch(session: Session) -> dict[str, Any]:
    """Return the actions per second of 1, 2, 4 and 8 observations at a time."""
    from vla_ros.engine.executor import Request

    subject = session.subject()
    engine, result = session.engine(drafts="none"), {}
    for batch in (1, 2) if session.dry else (1, 2, 4, 8):
        requests = [Request(*case) for case in session.inputs(subject, batch)]
        engine.warm_up([22], batch)
        times = []
        for _ in range(3 if session.dry else 40):
            began = time.perf_counter()
            engine.answer(requests)
            times.append(1e3 * (time.perf_counter() - began))
        ms = statistics.median(times[2:])
        result[f"batch {batch}"] = {"ms": ms, "actions_per_s": 1e3 * batch / ms}
    rates = [entry["actions_per_s"] for entry in result.values()]
    result["ratio"] = rates[-1] / rates[0]
    return result


def stage_steady(session: Session) -> dict[str, Any]:
    """Run 10,000 steps and report the slowest ones and memory growth.

    Images are 1280x720, the instruction changes every 50 steps, drafts are on, weights are of the first of
    ``--kinds``. "Plain" steps have no draft, or one that needed further passes: they cost as much as decoding. A
    changed instruction must not take more than twice their median.
    """
    import numpy as np

    from vla_ros.engine.drafts import DraftState
    from vla_ros.engine.executor import Request
    from vla_ros.types import RawImage
    from vla_ros.vision.processors import ResizeNaive

    kind = session.kinds[0]
    subject, engine = session.subject(kind), session.engine(kind)
    engine.warm_up([22, 80])
    prompts = [prompt for _, prompt in session.inputs(subject, 40, lengths=(14, 70))]
    noise = np.random.default_rng(0).integers(0, 256, (72, 128) if session.dry else (720, 1280), dtype=np.uint8)
    images = [np.stack([np.roll(noise, 7 * i + j, 1) for j in range(3)], -1) for i in range(8)]
    frames = [RawImage(image, processor=ResizeNaive()) for image in images]
    steps, settled = (120, 60) if session.dry else (10_000, 2500)  # by then every prompt length was seen
    times, plain, new, beside = (np.zeros(steps, dtype) for dtype in (np.float64, bool, bool, bool))
    state, start = DraftState(), _used(session)
    for _ in range(3):  # the first image of all is not what is asked here
        engine.answer([Request(frames[0], prompts[0])])
        engine.wait()
    for step in range(steps):
        new[step] = step % 50 == 0
        state = DraftState() if new[step] else state
        began = time.perf_counter()
        answer = engine.answer([Request(frames[step % 8], prompts[step // 50 % 40], state)])[0]
        times[step] = 1e3 * (time.perf_counter() - began)
        state, plain[step] = answer.draft, answer.accepted is None or answer.passes > 0
        beside[step] = not engine.wait(0)  # a capture ran in the background
        if step + 1 == settled:
            start = _used(session)
        if (step + 1) % (steps // 10) == 0:
            print(f"steady: step {step + 1}, p50 {np.median(times[: step + 1]):.2f} ms", flush=True)
        if time.monotonic() > session.deadline:
            break
    done, growth = step + 1, {name: 1e3 * (value - start[name]) for name, value in _used(session).items()}
    times, plain, new, beside = (values[:done] for values in (times, plain, new, beside))
    typical, slowest_new = float(np.median(times[plain])), float(times[new].max())
    return {
        "kind": kind, "steps": done, "plain_p50": typical, "p50": float(np.median(times)),
        "p99": float(np.percentile(times, 99)), "max": float(times.max()), "max_at": int(times.argmax()),
        "new_max": slowest_new, "new_ratio": slowest_new / typical,
        "over_twice": np.flatnonzero(times > 2 * typical).tolist()[:20],
        "captures_beside": int(beside.sum()), "beside_max": float(times[beside].max(initial=0)),
        "growth_mb": growth, "growth_since": settled,
        "ok": done == steps and slowest_new <= 2 * typical and max(growth.values()) < 64,
    }  # fmt: skip


def _used(session: Session) -> dict[str, float]:
    """Memory of this process on the host, and reserved and allocated by torch on the GPU, in gigabytes."""
    status = Path("/proc/self/status").read_text().splitlines()
    host = next(float(line.split()[1]) / 1e6 for line in status if line.startswith("VmRSS"))
    if session.dry:
        return {"host": host}
    cuda = session.torch.cuda
    return {
        "host": host, "gpu_reserved": cuda.memory_reserved() / 1e9, "gpu_allocated": cuda.memory_allocated() / 1e9,
    }  # fmt: skip
