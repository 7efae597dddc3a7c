"""Whole answers: the same tokens, and how fast."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from gpu.common import Session


def stage_tokens(session: Session) -> dict[str, Any]:
    """float32, 200 random inputs on tiny random checkpoints: tokens of the reference, plain and with drafts."""
    import numpy as np

    from vla_ros.bench.models import open_subject

    torch = session.torch
    subject = open_subject("tiny", session.device, torch.float32)
    plain, drafted = session.engine(subject, drafts="none"), session.engine(subject)
    same = {"plain": 0, "drafted": 0}
    cases = session.inputs(subject, 5 if session.dry else 200, lengths=(6, 60))
    previous = None
    for image, prompt in cases:
        with torch.inference_mode():
            patches = subject.model.embed_image(subject.model.normalize(torch.from_numpy(image).to(session.device)))
            logits, cache = subject.model.prefill(
                patches, torch.from_numpy(prompt)[None].to(session.device), room=7
            )
            expected = subject.model.greedy(logits, cache, 7).tokens[0].cpu().numpy()
        same["plain"] += np.array_equal(plain.answer(image, [prompt])[0].tokens, expected)
        draft = expected if previous is None or len(prompt) % 2 else previous
        same["drafted"] += np.array_equal(drafted.answer(image, [prompt], [draft])[0].tokens, expected)
        previous = expected
    failures = {length: str(error) for length, error in plain.failures().items()}
    return {**same, "of": len(cases), "capture_failures": failures, "ok": set(same.values()) == {len(cases)}}


def _bench(session: Session, quantization: str, baseline: bool, steps: int) -> dict[str, Any]:
    from vla_ros.bench.cli import add_arguments, bench
    from vla_ros.bench.report import render

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--model", session.name, "--device", str(session.device), "--quantization", quantization]
    words += ["--steps", str(2 if session.dry else steps), *([] if baseline else ["--no-baseline"])]
    result = bench(parser.parse_args(words))
    print(render(result))
    return result


def stage_bf16(session: Session) -> dict[str, Any]:
    """The 7B in bf16 against transformers' eager generate, 1,000 steps."""
    return _bench(session, "none", True, 1000)


def stage_int8(session: Session) -> dict[str, Any]:
    """The 7B in int8, own kernels."""
    return _bench(session, "int8", False, 300)


def stage_int4(session: Session) -> dict[str, Any]:
    """The 7B in 4 bits, own kernels."""
    return _bench(session, "nf4", False, 300)


def stage_batch(session: Session) -> dict[str, Any]:
    """Actions per second of 1, 2, 4 and 8 observations at a time."""
    import numpy as np

    subject = session.subject()
    engine, result = session.engine(subject, drafts="none"), {}
    for batch in (1, 2) if session.dry else (1, 2, 4, 8):
        cases = session.inputs(subject, batch)
        images, prompts = np.concatenate([image for image, _ in cases]), [prompt for _, prompt in cases]
        engine.warm_up([22], batch)
        times = []
        for _ in range(3 if session.dry else 40):
            began = time.perf_counter()
            engine.answer(images, prompts)
            times.append(1e3 * (time.perf_counter() - began))
        ms = statistics.median(times[2:])
        result[f"batch {batch}"] = {"ms": ms, "actions_per_s": 1e3 * batch / ms}
    rates = [entry["actions_per_s"] for entry in result.values()]
    result["ratio"] = rates[-1] / rates[0]
    return result


def stage_steady(session: Session) -> dict[str, Any]:
    """10,000 steps with frames of 1280x720, a new instruction every 50, drafts on: slowest steps, growth of memory.

    With the first of ``--kinds``. "Plain" are steps without a draft, and those whose draft needed further passes:
    what costs as much as decoding. A change of instruction must not take over twice their median.
    """
    import numpy as np

    from vla_ros.types import CameraFrame

    kind = session.kinds[0]
    subject = session.subject(kind)
    engine = session.engine(subject, kind)
    engine.warm_up([22, 80])
    prompts = [prompt for _, prompt in session.inputs(subject, 40, lengths=(14, 70))]
    noise = np.random.default_rng(0).integers(0, 256, (72, 128) if session.dry else (720, 1280), dtype=np.uint8)
    frames = [CameraFrame(np.stack([np.roll(noise, 7 * i + j, 1) for j in range(3)], -1)) for i in range(8)]
    steps, settled = (120, 60) if session.dry else (10_000, 2500)  # by then every prompt length was seen
    times, plain, new, beside = (np.zeros(steps, dtype) for dtype in (np.float64, bool, bool, bool))
    previous, start = None, _used(session)
    for _ in range(3):  # the first frame of all is not what is asked here
        engine.answer(frames[:1], prompts[:1])
        engine.wait()
    for step in range(steps):
        new[step] = step % 50 == 0
        prompt, draft = prompts[step // 50 % 40], None if new[step] else previous
        began = time.perf_counter()
        answer = engine.answer([frames[step % 8]], [prompt], [draft])[0]
        times[step] = 1e3 * (time.perf_counter() - began)
        plain[step] = answer.accepted is None or answer.passes > 0
        beside[step] = not engine.wait(0)  # a capture ran beside it
        previous = answer.tokens
        if step + 1 == settled:
            start = _used(session)
        if (step + 1) % (steps // 10) == 0:
            print(f"steady: step {step + 1}, p50 {np.median(times[: step + 1]):.2f} ms", flush=True)
        if time.monotonic() > session.deadline:
            break
    done, growth = step + 1, {name: 1e3 * (value - start[name]) for name, value in _used(session).items()}
    times, plain, new, beside = (values[:done] for values in (times, plain, new, beside))
    typical = float(np.median(times[plain]))
    return {
        "kind": kind, "steps": done, "plain_steps": int(plain.sum()), "plain_p50": typical,
        "p50": float(np.median(times)), "p99": float(np.percentile(times, 99)), "max": float(times.max()),
        "max_at": int(times.argmax()), "new_instructions": int(new.sum()), "new_max": float(times[new].max()),
        "new_ratio": float(times[new].max()) / typical,
        "over_twice": np.flatnonzero(times > 2 * typical).tolist()[:20],
        "captures_beside": int(beside.sum()), "beside_max": float(times[beside].max(initial=0)),
        "lengths": engine._of(1).ready, "growth_mb": growth, "growth_since": settled,
        "ok": done == steps and float(times[new].max()) <= 2 * typical and max(growth.values()) < 64,
    }  # fmt: skip


def _used(session: Session) -> dict[str, float]:
    """Gigabytes of the host's memory that this process has, and of the GPU's that torch has reserved and uses."""
    status = Path("/proc/self/status").read_text().splitlines()
    host = next(float(line.split()[1]) / 1e6 for line in status if line.startswith("VmRSS"))
    if session.dry:
        return {"host": host}
    cuda = session.torch.cuda
    return {
        "host": host, "gpu_reserved": cuda.memory_reserved() / 1e9, "gpu_allocated": cuda.memory_allocated() / 1e9,
    }  # fmt: skip


def stage_receiver(session: Session) -> dict[str, Any]:
    """The node's callback for a 1280x720 frame while the GPU answers frames: it must not wait for the GPU."""
    import logging
    import threading
    from types import SimpleNamespace

    import numpy as np

    from vla_ros.config import Config, LiveConfig
    from vla_ros.control.clock import Clock
    from vla_ros.control.inputs import Inputs
    from vla_ros.control.mailbox import Mailbox
    from vla_ros.control.safety import Safety
    from vla_ros.control.watchdog import Watchdog
    from vla_ros.node.context import Context, News
    from vla_ros.node.receiver import Frame, FrameReceiver
    from vla_ros.telemetry.stats import Stats
    from vla_ros.types import CameraFrame
    from vla_ros.vision.decode import decode_image, encode_image

    subject = session.subject()
    engine = session.engine(subject, drafts="none")
    engine.warm_up([22])
    ((_, prompt),) = session.inputs(subject, 1)
    pixels = np.random.default_rng(0).integers(0, 256, (720, 1280, 3), dtype=np.uint8)
    options, clock, logger = LiveConfig(Config()), Clock(), logging.getLogger("receiver")
    mailbox = Mailbox[Frame](clock)
    watchdog = Watchdog(options, options.current.camera.topics, joints_required=False)
    nobody = SimpleNamespace(frame=lambda outcome: None, step=lambda step: None)
    context = Context(
        options, clock, Inputs(clock), Safety(clock.ros), watchdog, Stats(), nobody, News(logger), logger
    )
    receiver = FrameReceiver(context, [mailbox])
    over, answered = threading.Event(), []

    def answer() -> None:
        while not over.is_set():
            frame = mailbox.take(0.1)
            if frame is not None:
                engine.answer([CameraFrame(decode_image(frame.data).image)], [prompt])
                answered.append(frame.stamp)

    thread = threading.Thread(target=answer)
    thread.start()
    times = []
    for _ in range(50 if session.dry else 1500):
        pixels[0, 0] += 1  # a frozen picture is another matter
        message = encode_image(pixels, time.time_ns(), "camera")
        began = time.perf_counter()
        receiver.receive(0, message)
        times.append(1e3 * (time.perf_counter() - began))
        time.sleep(0.005)
    over.set()
    thread.join()
    return {"p50": float(np.median(times)), "p99": float(np.percentile(times, 99)), "answered": len(answered)}
