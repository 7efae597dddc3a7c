"""One session on a GPU: correctness first, then times, a short table last.

    python benchmarks/gpu_session.py                      # every stage
    python benchmarks/gpu_session.py --stages kernels,tune,bf16
    python benchmarks/gpu_session.py --dry                # on a CPU with a tiny model, to try the script

Needs torch with CUDA, Triton and transformers; the package itself is taken from ../src. Results are written as
JSON to the folder $OUT, or ``--out``. Every stage has a process of its own and a bound in time; one that fails does
not stop the others. ``tune`` writes launches.json there, which later stages of the same folder use.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

BOUND_S = {
    "kernels": 150, "tune": 200, "tokens": 150, "bf16": 180, "int8": 120, "int4": 120, "guard": 90, "batch": 120,
    "steady": 150, "receiver": 60, "gemm": 90,
}  # fmt: skip
"""Stage to the most seconds that it may take, in the order in which they run."""

RELATIVE = {"float32": 1e-5, "bfloat16": 1e-2}


class Session:
    """What every stage needs: the device, sizes, and where results go."""

    def __init__(self, out: Path, dry: bool) -> None:
        import torch

        self.torch, self.out, self.dry = torch, out, dry
        self.device = torch.device("cpu" if dry else "cuda:0")
        self.name = "tiny" if dry else "openvla-7b"
        self.dtype = torch.float32 if dry else torch.bfloat16
        tuned = out / "launches.json"
        if tuned.exists() and not dry:
            from vla_ros.engine import triton_ops

            for key, values in json.loads(tuned.read_text()).items():
                role, kind = key.split()
                triton_ops.LAUNCHES[role, kind] = triton_ops.Launch(*values)

    def subject(self, dtype: Any = None) -> Any:
        """The 7B with random weights, or the tiny model."""
        from vla_ros.bench.models import open_subject

        return open_subject(self.name, self.device, dtype or self.dtype)

    def engine(self, subject: Any, kind: str = "none", drafts: str = "prefill", keep: bool = True) -> Any:
        """An engine over it."""
        from vla_ros.policies.openvla.fast import make_engine

        return make_engine(subject.model, 7, kind, drafts, keep=keep)

    def inputs(self, subject: Any, count: int, seed: int = 0, lengths: tuple[int, int] = (22, 22)) -> list[Any]:
        """Random pictures [1, H, W, 3] and prompts."""
        import numpy as np

        rng = np.random.default_rng(seed)
        architecture = subject.model.architecture
        size, made = architecture.image_size, []
        for _ in range(count):
            words = rng.integers(
                3, architecture.action_vocab_size // 2, rng.integers(lengths[0], lengths[1] + 1) - 2
            )
            image = rng.integers(0, 256, (1, size, size, 3), dtype=np.uint8)
            made.append((image, np.array([1, *words, architecture.empty_token], dtype=np.int64)))
        return made

    def time_ms(self, work: Callable[[], Any], repeats: int = 50) -> float:
        """Median of graph replays on a GPU (gaps between launches left out), of calls on a CPU."""
        torch = self.torch
        if self.dry:
            began = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - began)
        from vla_ros.engine.runner import CudaRunner

        replay = CudaRunner(self.device).capture(work)
        times = []
        for _ in range(repeats + 5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times[5:])


def relative(ours: Any, theirs: Any) -> float:
    """Error in the norm; NaN stays NaN and fails every bound."""
    return float(((ours.double() - theirs.double()).norm() / theirs.double().norm()).item())


def make_layer(session: Session, kind: str, dtype: Any, shape: Any) -> Any:
    """Random decoder weights of one layer with OpenVLA-7B's sizes."""
    from vla_ros.engine.weights import QUANTIZE, DecoderWeights, Layer, dense, rotary_tables

    torch, device = session.torch, session.device

    def noise(*size: int) -> Any:
        return (torch.randn(*size, device=device) / size[-1] ** 0.5).to(dtype)

    quantize, hidden = QUANTIZE[kind], shape.hidden_size
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layer = Layer(
        1 + 0.1 * noise(hidden, 1)[:, 0], quantize(noise(heads, hidden)),
        quantize(noise(hidden, shape.heads * shape.head_dim)), 1 + 0.1 * noise(hidden, 1)[:, 0],
        quantize(noise(2 * shape.intermediate_size, hidden)), quantize(noise(hidden, shape.intermediate_size)),
    )  # fmt: skip
    cosine, sine = (table.to(device, dtype) for table in rotary_tables(shape))
    embedding = torch.randn(shape.vocab_size, hidden, device=device).to(dtype)
    head = dense(noise(shape.vocab_size, hidden))
    return DecoderWeights(shape, embedding, (layer,), layer.attention_norm, head, cosine, sine)


def shape_of(session: Session) -> Any:
    """Sizes of one decoder layer."""
    from vla_ros.bench.models import OPENVLA_7B
    from vla_ros.policies.openvla.tiny import tiny_architecture

    return replace((tiny_architecture() if session.dry else OPENVLA_7B).llm, layers=1)


def wide(weights: Any) -> Any:
    """The same weights, dequantised, in float64: the reference."""
    from vla_ros.engine.weights import Layer, dense, dequantize

    def cast(value: Any) -> Any:
        return value.double()

    layers = tuple(
        Layer(cast(one.attention_norm), *(dense(cast(dequantize(m, weights.dtype))) for m in (one.qkv, one.output)),
              cast(one.mlp_norm), *(dense(cast(dequantize(m, weights.dtype))) for m in (one.gate_up, one.down)))
        for one in weights.layers
    )  # fmt: skip
    return replace(
        weights, embedding=cast(weights.embedding), layers=layers, norm=cast(weights.norm),
        head=dense(cast(weights.head.data)), cosine=cast(weights.cosine), sine=cast(weights.sine),
    )  # fmt: skip


def stage_kernels(session: Session) -> dict[str, Any]:
    """Every kernel against float64, with fresh random inputs; rows must not depend on their neighbours."""
    from vla_ros.engine.decoder import Cache, prefill, verify
    from vla_ros.engine.executor import make_ops
    from vla_ros.engine.ops import TorchOps

    torch, result = session.torch, {}
    for name in ("float32", "bfloat16"):
        for kind in ("none", "int8", "int4"):
            weights = make_layer(session, kind, getattr(torch, name), shape_of(session))
            exact, ops, reference = wide(weights), make_ops(session.device), TorchOps()
            patches = torch.randn(2, 64, weights.shape.hidden_size, device=session.device).to(weights.dtype)
            text = torch.randint(0, 300, (2, 40), device=session.device)
            last = torch.tensor([90, 95], dtype=torch.int32, device=session.device)
            fed = torch.randint(0, 300, (2, 6), device=session.device)
            outputs = []
            for one, how in ((weights, ops), (exact, reference)):
                cache = Cache.allocate(one, 2, 128)
                for part in (*cache.keys, *cache.values):
                    part.fill_(1e4)  # poison: what is not written shows
                first = prefill(one, how, cache, patches.to(one.dtype), text, last, 7)
                outputs.append((first, verify(one, how, cache, fed, last + 1), cache))
            errors = [relative(a, b) for a, b in zip(outputs[0][:2], outputs[1][:2], strict=True)]
            cache = outputs[0][2]
            alone = torch.cat(
                [verify(weights, ops, cache, fed[:, i : i + 1], last + 1 + i) for i in range(6)], dim=1
            )
            bits = torch.equal(alone, outputs[0][1])
            again = verify(weights, ops, cache, fed, last + 1)
            good = max(errors) <= RELATIVE[name] and torch.equal(again, outputs[0][1]) and (bits or session.dry)
            result[f"{name} {kind}"] = {"prefill": errors[0], "verify": errors[1], "rows_equal": bits, "ok": good}
    table = torch.randn(1, 9, 32064, device=session.device)
    table[0, 3, [5, 32000]], table[0, 4, 7] = 9.0, float("nan")
    tokens, margins = make_ops(session.device).choose(table)
    keep = [0, 1, 2, 3, 5, 6, 7, 8]
    good = torch.equal(tokens[0, keep].cpu(), table[0, keep].cpu().argmax(-1)) and bool(margins[0, 4].isnan())
    result["choose"] = {"ok": good}
    result["ok"] = all(entry["ok"] for entry in result.values())
    return result


def stage_tune(session: Session) -> dict[str, Any]:
    """Every role and kind with many launches, cold weights (rotated beyond the cache); the best are kept."""
    torch = session.torch
    if session.dry:
        return {"skipped": "needs CUDA"}
    from vla_ros.engine.triton_ops import LAUNCHES, Launch, TritonOps

    best, deadline, table = {}, time.monotonic() + 170, {}
    shape = shape_of(session)
    for kind in ("none", "int4", "int8"):
        sets = [make_layer(session, kind, torch.bfloat16, shape) for _ in range(3)]  # 1.2 GB: more than the L2
        hidden = torch.randn(1, 1, shape.hidden_size, device=session.device, dtype=torch.bfloat16)
        mixed = torch.randn(1, 1, shape.intermediate_size, device=session.device, dtype=torch.bfloat16)
        cache = torch.zeros(2, 1, shape.kv_heads, 320, shape.head_dim, device=session.device, dtype=torch.bfloat16)
        at = torch.full((1, 1), 290, dtype=torch.int32, device=session.device)
        stored = {"none": "dense"}.get(kind, kind)

        def work(role: str, ops: Any, one: Any, hidden: Any = hidden, mixed: Any = mixed, at: Any = at,
                 cache: Any = cache) -> None:  # fmt: skip
            layer = one.layers[0]
            if role == "qkv":
                ops.qkv(one, layer, hidden, at, cache[0], cache[1])
            elif role == "add":
                ops.add_linear(hidden.clone(), mixed, layer.down)
            elif role == "gate_up":
                ops.gate_up(one, layer, hidden)
            else:
                ops.head(one, hidden)

        for role in ("gate_up", "add", "qkv") + (("head",) if kind == "none" else ()):
            matrix = {"qkv": sets[0].layers[0].qkv, "add": sets[0].layers[0].down,
                      "gate_up": sets[0].layers[0].gate_up, "head": sets[0].head}[role]  # fmt: skip
            found = []
            for outputs in (8, 16, 32) if role in ("qkv", "gate_up") else (16, 32, 64):
                for inputs in (256,) if kind == "int4" else (128, 256, 512):
                    for warps in (2, 4, 8):
                        for stages in (3, 4, 6):
                            if time.monotonic() > deadline or outputs * inputs * 2 * stages > 190_000:
                                continue
                            launch = Launch(outputs, inputs, warps, stages)
                            ops = TritonOps({(role, stored): launch})
                            try:
                                ms = (
                                    session.time_ms(
                                        lambda r=role, o=ops, s=sets: [work(r, o, one) for one in s], 12
                                    )
                                    / 3
                                )
                            except Exception as error:  # one launch that does not fit must not end the search
                                found.append((1e9, launch, str(error)[:80]))
                                continue
                            found.append((ms, launch, ""))
            found.sort(key=lambda entry: entry[0])
            if found and found[0][0] < 1e9:
                ms, launch, _ = found[0]
                now = [entry[0] for entry in found if entry[1] == LAUNCHES[role, stored]]
                best[f"{role} {stored}"] = [launch.outputs, launch.inputs, launch.warps, launch.stages]
                table[f"{role} {stored}"] = {
                    "us": 1e3 * ms, "gb_per_s": matrix.nbytes / ms / 1e6, "launch": best[f"{role} {stored}"],
                    "default_us": 1e3 * now[0] if now else None, "tried": len(found),
                }  # fmt: skip
        torch.cuda.empty_cache()
        (session.out / "launches.json").write_text(json.dumps(best, indent=1))
    return table


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


def stage_guard(session: Session) -> dict[str, Any]:
    """How far apart the logits of a drafted prefill and of decoding are: what ``drafts.GUARDS`` must exceed."""
    from vla_ros.engine.decoder import Cache, prefill, verify
    from vla_ros.engine.executor import make_ops

    torch, subject = session.torch, session.subject()
    engine, ops = session.engine(subject), make_ops(session.device)
    weights, patches_count, differences, spreads = engine.weights, subject.model.architecture.patches, [], []
    with torch.inference_mode():
        for image, prompt in session.inputs(subject, 2 if session.dry else 40):
            patches = subject.model.embed_image(subject.model.normalize(torch.from_numpy(image).to(session.device)))
            draft = torch.randint(0, 300, (6,))
            text = torch.cat([torch.from_numpy(prompt), draft, torch.zeros(4, dtype=torch.int64)])[None]
            text = text.to(session.device)
            last = torch.tensor([patches_count + len(prompt) - 1], dtype=torch.int32, device=session.device)
            cache = Cache.allocate(weights, 1, text.shape[1] + patches_count + 7)
            inside = prefill(weights, ops, cache, patches, text, last, 7)[:, 1:]
            after = verify(weights, ops, cache, draft[None].to(session.device), last + 1)
            # A row's margin moves by at most the difference of two logits: the top ones of either side count.
            top = torch.cat([inside.topk(5).indices, after.topk(5).indices], dim=-1)
            differences.append((inside - after).gather(-1, top).abs().amax(-1).flatten())
            spreads.append(after.std(-1).flatten())
    values = torch.cat(differences).cpu()
    return {
        "max": values.max().item(),
        "p99": values.quantile(0.99).item(),
        "median": values.median().item(),
        "logit_std": torch.cat(spreads).mean().item(),
        "guard_suggested": 2 * values.max().item(),
    }


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
    """Many steps, a new instruction every 50, drafts on: growth of memory, and the slowest step."""
    import numpy as np

    torch, subject = session.torch, session.subject()
    engine = session.engine(subject)
    engine.warm_up([22, 80])
    cases = session.inputs(subject, 40, lengths=(14, 70))
    steps, deadline = (12 if session.dry else 10_000), time.monotonic() + BOUND_S["steady"] - 50
    times, drafted, previous, start = [], [], None, None

    def used() -> tuple[float, float]:
        status = Path("/proc/self/status").read_text().splitlines()
        host = next(float(line.split()[1]) / 1e6 for line in status if line.startswith("VmRSS"))
        return (0.0 if session.dry else torch.cuda.memory_reserved() / 1e9), host

    for step in range(steps):
        image, prompt = cases[step % 40][0], cases[step // 50 % 40][1]
        draft = None if step % 50 == 0 else previous
        began = time.perf_counter()
        answer = engine.answer(image, [prompt], [draft])[0]
        (times if draft is None or answer.passes else drafted).append(1e3 * (time.perf_counter() - began))
        previous = answer.tokens
        if step == min(2500, steps // 2):  # every prompt length was seen once by then
            start = used()
        if time.monotonic() > deadline:
            break
    end = used()
    assert start is not None
    return {
        "steps": step + 1, "p50": float(np.median(times)), "p99": float(np.percentile(times, 99)),
        "max": max(times), "lengths": engine._of(1).ready, "gpu_growth_gb": end[0] - start[0],
        "host_growth_gb": end[1] - start[1],
    }  # fmt: skip


def stage_receiver(session: Session) -> dict[str, Any]:
    """The receiver's callback (one copy of a 1280x720 frame) while the GPU works."""
    import threading

    import numpy as np

    from vla_ros.engine.staging import FrameRing, pinned_frame

    subject = session.subject()
    engine = session.engine(subject, drafts="none")
    engine.warm_up([22])
    ((image, prompt),) = session.inputs(subject, 1)
    ring = FrameRing(lambda: pinned_frame(720, 1280))
    frame = np.random.default_rng(0).integers(0, 256, (720, 1280, 3), dtype=np.uint8)
    over = threading.Event()

    def answer() -> None:
        while not over.is_set():
            ring.take()
            engine.answer(image, [prompt])

    thread = threading.Thread(target=answer)
    thread.start()
    times = []
    for stamp in range(50 if session.dry else 1500):
        began = time.perf_counter()
        ring.put(lambda slot: np.copyto(slot, frame), stamp)
        times.append(1e3 * (time.perf_counter() - began))
        time.sleep(0.005)
    over.set()
    thread.join()
    return {"p50": float(np.median(times)), "p99": float(np.percentile(times, 99))}


def stage_gemm(session: Session) -> dict[str, Any]:
    """A quantised prefill's products: dequantising on the way, or first."""
    from vla_ros.engine.ops import TorchOps

    torch, result = session.torch, {}
    if session.dry:
        return {"skipped": "needs CUDA"}
    from vla_ros.engine.triton_ops import TritonOps

    shape = shape_of(session)
    for kind in ("none", "int8", "int4"):
        weights = make_layer(session, kind, torch.bfloat16, shape)
        hidden = torch.randn(1, 288, shape.hidden_size, device=session.device, dtype=torch.bfloat16)
        expected = TorchOps().gate_up(weights, weights.layers[0], hidden)
        for fused in (True, False) if kind != "none" else (False,):
            ops = TritonOps(fused_gemm=fused)
            error = relative(ops.gate_up(weights, weights.layers[0], hidden), expected)
            ms = session.time_ms(lambda o=ops, w=weights, h=hidden: o.gate_up(w, w.layers[0], h))
            flops = 2 * 288 * weights.layers[0].gate_up.outputs * shape.hidden_size
            result[f"{kind} {'fused' if fused else 'separate'}"] = {
                "us": 1e3 * ms, "tflops": flops / ms / 1e9, "error": error,
            }  # fmt: skip
    return result


def run_stage(name: str, out: Path, dry: bool) -> int:
    """One stage in this process; its result goes to ``out/NAME.json``."""
    began = time.monotonic()
    try:
        result = globals()[f"stage_{name}"](Session(out, dry))
    except Exception:
        traceback.print_exc()
        result = {"failed": traceback.format_exc().splitlines()[-1]}
    result["seconds"] = round(time.monotonic() - began, 1)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1, default=str))
    return int("failed" in result)


def summary(out: Path, names: list[str]) -> str:
    """A line per stage."""
    lines = []
    for name in names:
        path = out / f"{name}.json"
        result = json.loads(path.read_text()) if path.exists() else {"failed": "ended without a result"}
        if "total_ms" in result:
            keep = ("total_ms", "accepted_ms", "baseline_ms", "speedup", "floor_ms", "tokens_equal", "token_match",
                    "memory_gb")  # fmt: skip
            result = {key: result[key] for key in keep}
        lines.append(f"{name:<9}{json.dumps(result, default=str)[:600]}")
    return "\n".join(lines)


def main() -> int:
    """Run the stages that were asked for, each in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=",".join(BOUND_S), help=f"some of {', '.join(BOUND_S)}")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu_session")))
    parser.add_argument("--seconds", type=float, default=570.0, help="for all stages together")
    parser.add_argument("--dry", action="store_true", help="on a CPU, with a tiny model")
    parser.add_argument("--stage", choices=tuple(BOUND_S), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.stage:
        return run_stage(options.stage, options.out, options.dry)
    names, status, deadline = options.stages.split(","), 0, time.monotonic() + options.seconds
    unknown = sorted(set(names) - set(BOUND_S))
    if unknown:
        parser.error(f"--stages: {unknown} are none of {list(BOUND_S)}")
    for name in names:
        left = min(BOUND_S[name], deadline - time.monotonic() - 5)
        if left < 15:
            print(f"== {name}: no time left", flush=True)
            continue
        print(f"== {name}", flush=True)
        command = [sys.executable, __file__, "--stage", name, "--out", str(options.out)]
        try:
            status |= subprocess.run(
                [*command, *(["--dry"] if options.dry else [])], timeout=left, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            print(f"== {name}: ended after {left:.0f} s", flush=True)
            status = 1
    print(summary(options.out, names))
    return status


if __name__ == "__main__":
    sys.exit(main())
