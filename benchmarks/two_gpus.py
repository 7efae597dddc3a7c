"""Measures OpenVLA and OpenVLA-OFT split over two GPUs (``policy.gpus: 2``) against one, in turns.

    python benchmarks/two_gpus.py [--steps 150] [--only bf16,fp8,int8,int4,oft,reduce,faults]
    python benchmarks/two_gpus.py --device cpu --small --steps 5 --only bf16,oft,faults    # over gloo

Writes a checkpoint of published sizes with random weights, 16 GB, and removes it. Both policies of a row are in one
process; rows load at the same time and are timed one after the other. ``reduce`` times bare all-reduces in CUDA
graphs with settings of NCCL; ``faults`` kills and stops a rank of a small model during inferences.
"""

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]  # this is run as a file

INSTRUCTION = "pick up the red cube"
ROWS = {"bf16": "none", "fp8": "fp8", "int8": "int8", "int4": "int4", "oft": "none"}
"""Rows and the quantisation of their weights."""
FIRST = ("bf16", "oft", "fp8")
"""Rows that load together; the others follow at the end, if there is time."""
TARGETS = {"bf16": 0.72, "fp8": 0.80, "oft": 0.75}
SETTINGS: dict[str, dict[str, str]] = {"as run": {}, "LL": {"NCCL_PROTO": "LL"}}
"""Settings of NCCL to compare."""
SIZES = {"1 row": (4096, "float32"), "7 rows": (7 * 4096, "float32"), "288 rows": (288 * 4096, "bfloat16"),
         "640 rows": (640 * 4096, "bfloat16")}  # fmt: skip
"""All-reduces: of a decoding pass, a verified draft, OpenVLA's prefill and OFT's pass; numbers and type."""
LAYERS = 32
FAULTS = ("kill", "stop")
SHARDS = 8
SMALL: dict[str, Any] = {"vision_width": 64, "llm_width": 512, "llm_heads": 4, "llm_layers": 2}


def write(folder: Path, device: str, small: bool) -> None:
    """Write the checkpoints: OpenVLA, OFT, which shares its files, and a small one."""
    import torch

    from benchmarks.models.oft import MODELS
    from benchmarks.models.subject import random_weights
    from tools.checkpoints.openvla import config_json
    from tools.checkpoints.tiny import tiny_architecture, write_tiny
    from tools.checkpoints.vocabulary import PROMPT_WORDS, TABLE_WORDS, word_ids, write_tokenizer
    from vla_ros_models.checkpoint_files import INDEX
    from vla_ros_models.oft.network import OFTModel
    from vla_ros_models.weights import empty

    write_tiny(folder / "small", architecture=tiny_architecture(**SMALL))
    architecture, layout, _, _ = MODELS["openvla-oft-7b"]
    architecture = tiny_architecture(**SMALL) if small else architecture
    network = empty(lambda: OFTModel(architecture, layout))
    names = [name for name, _ in network.named_parameters()]
    weights = dict(random_weights(network, torch.device(device), torch.bfloat16)(names))
    groups = ("action", layout.action), ("proprio", layout.state)
    ranges: Any = {
        name: {"q01": [-1.0] * size, "q99": [1.0] * size, "mask": [True] * size} for name, size in groups
    }
    ids = word_ids((*PROMPT_WORDS, *TABLE_WORDS), architecture.empty_token)
    parts = [[name for name in names if not is_of_oft(name)][part::SHARDS] for part in range(SHARDS)]
    parts.append([name for name in names if is_of_oft(name)])
    files = {f"model-{number}.safetensors": part for number, part in enumerate(parts)}
    with ThreadPoolExecutor(SHARDS) as threads:
        list(threads.map(lambda file: write_tensors(folder / file, files[file], weights), files))
    for name in ("openvla", "oft"):
        (folder / name).mkdir()
        used = {file: part for file, part in files.items() if name == "oft" or not is_of_oft(part[0])}
        for file in used:
            os.link(folder / file, folder / name / file)
        index = {"weight_map": {tensor: file for file, part in used.items() for tensor in part}}
        config = config_json(architecture, {"random": ranges}, "bfloat16")
        for file, content in (
            (INDEX, index),
            ("config.json", config),
            ("dataset_statistics.json", {"random": ranges}),
        ):
            (folder / name / file).write_text(json.dumps(content))
        write_tokenizer(folder / name, ids)


def is_of_oft(name: str) -> bool:
    return name.startswith(("action_head", "proprio"))


def write_tensors(file: Path, names: Sequence[str], weights: dict[str, Any]) -> None:
    """Write a safetensors file; several threads may write at once."""
    import torch

    header, end = {}, 0
    for name in names:
        header[name] = {
            "dtype": "BF16", "shape": list(weights[name].shape), "data_offsets": [end, end + weights[name].nbytes],
        }  # fmt: skip
        end += weights[name].nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            weights[name].cpu().contiguous().view(torch.uint8).numpy().tofile(out)


def make_policy(row: str, folder: Path, device: str, gpus: int, **options: Any) -> Any:
    from vla_ros.config import CameraConfig, Config, TimeoutsConfig
    from vla_ros_models.oft import OFTOptions
    from vla_ros_models.oft.policy import OFTPolicy
    from vla_ros_models.openvla.options import OpenVLAOptions
    from vla_ros_models.openvla.policy import OpenVLAPolicy

    timeouts = TimeoutsConfig(inference=2.0 if row == "small" else 30.0)
    known = {"device": device, "gpus": gpus, "quantization": ROWS.get(row, "none"), "engine": "graph", **options}
    if row == "oft":
        options_of = OFTOptions(checkpoint=str(folder / "oft"), chunk=8, images=2, **known)
        return OFTPolicy(Config(options_of, CameraConfig(keys=("front", "wrist")), timeouts=timeouts))
    name = "small" if row == "small" else "openvla"
    drafts = {"drafts": "none"} | known
    return OpenVLAPolicy(Config(OpenVLAOptions(checkpoint=str(folder / name), **drafts), timeouts=timeouts))


class Camera:
    """Camera messages, the same for every policy."""

    def __init__(self, policy: Any) -> None:
        from vla_ros_lab.bench.times import make_messages

        self.spec = policy.spec
        self.messages = [make_messages(480, 640, seed, grain=8) for seed, _ in enumerate(self.spec.images)]

    def infer(self, policy: Any, session: Any, index: int) -> tuple[Any, float]:
        """Return the chunk of one step, and the milliseconds from its messages to it."""
        from vla_ros.types import Observation, RawImage
        from vla_ros.vision.decode import decode_image
        from vla_ros.vision.preprocess import process

        encoded = [message(index) for message in self.messages]
        began = time.perf_counter()
        raw = {
            feature.key: RawImage(decode_image(message).image, processor=feature.processor)
            for feature, message in zip(self.spec.images, encoded, strict=True)
        }
        state = {one.key: np.linspace(-0.5, 0.5, one.size) for one in self.spec.state}
        on_host = {} if policy._resizing_device() else {key: process(one) for key, one in raw.items()}
        chunk = policy.infer(session, Observation(on_host, INSTRUCTION, 0, state, {} if on_host else raw))
        return chunk, 1e3 * (time.perf_counter() - began)


def wait_for_turn(row: str, folder: Path) -> None:
    (folder / f"gate_{row}.ready").touch()
    while not (folder / f"gate_{row}").exists():
        time.sleep(0.05)


def compare(row: str, folder: Path, device: str, steps: int) -> dict[str, Any]:
    """Load both policies, wait for the gate, compare and time them."""
    import torch

    began, used = time.perf_counter(), [0.0]
    one = make_policy(row, folder, device, 1, self_test=False)
    one.load()
    loaded = time.perf_counter()
    used.append(torch.cuda.memory_allocated() / 1e9)
    two = make_policy(row, folder, device, 2)
    two.load()
    used.append(torch.cuda.memory_allocated() / 1e9)
    found: dict[str, Any] = {"load_s": [loaded - began, time.perf_counter() - loaded]}
    found["memory_gb"] = [used[1], used[2] - used[1]]  # of rank 0
    found["plan"] = two._memory.require("bfloat16", ROWS[row])
    wait_for_turn(row, folder)
    camera, both = Camera(one), (one, two)
    sessions = [policy.start_session() for policy in both]
    for index in range(10):
        for policy, session in zip(both, sessions, strict=True):
            camera.infer(policy, session, index)
    for policy in both:
        policy.loaded.engine.wait(60)
    times: list[list[float]] = [[], []]
    stages: list[list[dict[str, float]]] = [[], []]
    chunks: list[list[Any]] = [[], []]
    for index in range(steps):
        order = (0, 1) if index % 2 else (1, 0)
        for which in order:
            chunk, ms = camera.infer(both[which], sessions[which], index)
            times[which].append(ms)
            stages[which].append(dict(chunk.stages_ms))
            chunks[which].append(chunk)
    found["ms"] = [float(np.median(one)) for one in times]
    found["p99"] = [float(np.percentile(one, 99)) for one in times]
    found["stages"] = [{name: float(np.median([one[name] for one in some])) for name in some[0]} for some in stages]
    found |= differences(*chunks)
    if row != "oft":
        drafted = [make_turns(policy, camera, chunks[which], steps // 3) for which, policy in enumerate(both)]
        found["drafted"] = drafted
    again = [camera.infer(two, sessions[1], index)[0] for index in range(10)]
    found["repeats"] = all(
        np.array_equal(a.normalized, b.normalized) for a, b in zip(again, chunks[1], strict=False)
    )
    began = time.perf_counter()
    two.close()
    found["close_s"] = time.perf_counter() - began
    return found


def make_turns(policy: Any, camera: Camera, chunks: Sequence[Any], steps: int) -> float:
    """Return the median milliseconds with right drafts: the answers are known."""
    from dataclasses import replace

    from vla_ros_models.engine.drafts import DraftState

    engine, found = policy.loaded.engine, []
    kept = engine.options, engine.guard
    engine.options, engine.guard = replace(engine.options, drafts="prefill"), 0.0
    session = policy.start_session()
    camera.infer(policy, session, 0)
    for index in range(steps):
        session.draft = DraftState(tuple(chunks[index].tokens.tolist()))
        found.append(camera.infer(policy, session, index)[1])
    engine.options, engine.guard = kept
    return float(np.median(found[len(found) // 4 :]))


def differences(one: Sequence[Any], two: Sequence[Any]) -> dict[str, Any]:
    """Compare tokens, with the margin at each answer's first difference, or numbers."""
    if one[0].tokens is None:
        off = [float(np.abs(a.normalized - b.normalized).max()) for a, b in zip(one, two, strict=True)]
        return {"largest_difference": max(off), "spread": float(np.std([a.normalized for a in one]))}
    margins, equal, total = [], 0, 0
    for a, b in zip(one, two, strict=True):
        differing = np.flatnonzero(a.tokens != b.tokens)
        first = int(differing[0]) if differing.size else len(a.tokens)
        equal, total = equal + first, total + min(first + 1, len(a.tokens))
        if differing.size:
            margins.append(float(a.info["logit_margins"][first]))
    every = [margin for a in one for margin in a.info["logit_margins"]]
    return {"answers": len(one), "differ": len(margins), "compared": total, "equal": equal,
            "tie_margins": sorted(margins)[-5:], "median_margin": float(np.median(every))}  # fmt: skip


def reduce(rank: int, folder: Path) -> dict[str, Any]:
    """Time all-reduces in a CUDA graph, as one of two ranks; microseconds each."""
    import torch

    from vla_ros_models.engine.ranks import GroupOfRanks

    device = torch.device("cuda", rank)
    group = GroupOfRanks(rank, 2, device, folder)
    found: dict[str, Any] = {}
    for name, (count, dtype) in SIZES.items():
        tensor, graph = torch.ones(count, dtype=getattr(torch, dtype), device=device), torch.cuda.CUDAGraph()
        group.sum(tensor)
        found[f"{name} is right"] = bool((tensor == 2).all())
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for _ in range(3):
                group.sum(tensor)
            stream.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(2 * LAYERS):
                group.sum(tensor)
            graph.capture_end()
            tensor.zero_()
            times = []
            for _ in range(12):
                event: Any = torch.cuda.Event
                start, end = event(enable_timing=True), event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(1e3 * start.elapsed_time(end) / (2 * LAYERS))
        found[name] = float(np.median(times[4:]))
    return found


def shard(device: str, seconds: float) -> dict[str, Any]:
    """Check and time the passes of a whole decoder and of one of two ranks, without all-reduces: us a layer.

    Needs one GPU.
    """
    from dataclasses import replace

    import torch

    from benchmarks.models.subject import OPENVLA_7B, random_weights
    from vla_ros_models.engine.device_ops import make_ops
    from vla_ros_models.engine.kernel_check import check_products
    from vla_ros_models.engine.passes import decoding_passes
    from vla_ros_models.engine.ranks import Ranks
    from vla_ros_models.engine.runner import make_runner
    from vla_ros_models.openvla.loading import build_shard, fill_quantized
    from vla_ros_models.openvla.network import OpenVLAModel
    from vla_ros_models.splitting import Shard

    found: dict[str, Any] = {}
    few, where, count = replace(OPENVLA_7B, llm=replace(OPENVLA_7B.llm, layers=8)), torch.device(device), 8
    for kind, gpus in ((kind, gpus) for kind in ("none", "fp8", "int8", "int4") for gpus in (1, 2)):
        if time.monotonic() - BEGAN > seconds:
            break
        model = build_shard(OpenVLAModel, few, Shard(0, gpus))
        produce = random_weights(model, where, torch.bfloat16)
        weights = fill_quantized(model, produce, where, torch.bfloat16, kind)
        del model
        ops, runner = make_ops(where, Ranks() if gpus > 1 else None), make_runner(where)
        result = found[f"{kind}, {gpus}"] = {}
        try:
            check_products(ops, weights)
            result["right"] = True
            with torch.inference_mode():
                for name, run in decoding_passes(weights, ops, 288, count).items():
                    result[name] = graph_us(runner, run) / count
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        print(kind, gpus, result, f"{time.monotonic() - BEGAN:.0f} s", file=sys.stderr, flush=True)
        del weights, ops, runner
        torch.cuda.empty_cache()
    return found


def graph_us(runner: Any, run: Any) -> float:
    """Return the microseconds of a pass as a CUDA graph."""
    stage, times = runner.capture(run), []
    with runner.stream():
        for _ in range(40):
            start = runner.mark()
            stage()
            times.append(1e3 * runner.milliseconds(start, runner.mark()))
    return float(np.median(times[10:]))


def messages() -> dict[str, Any]:
    """Time half a round trip between two processes: a message in a socket, and a flag in shared memory."""
    import mmap
    import socket

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    flags = mmap.mmap(-1, 16)
    count = 3000
    child = os.fork()
    if child == 0:
        for _ in range(count):
            theirs.send(theirs.recv(64))
        for number in range(1, count + 1):
            while flags[0] != number % 250 + 1:
                pass
            flags[8] = number % 250 + 1
        os._exit(0)
    found: dict[str, list[float]] = {"socket": [], "flag": []}
    for _ in range(count):
        time.sleep(2e-4)  # the other side sleeps, as between inferences
        began = time.perf_counter()
        ours.send(b"vision 1 288")
        ours.recv(64)
        found["socket"].append(time.perf_counter() - began)
    for number in range(1, count + 1):
        began = time.perf_counter()
        flags[0] = number % 250 + 1
        while flags[8] != number % 250 + 1:
            pass
        found["flag"].append(time.perf_counter() - began)
    os.waitpid(child, 0)
    return {name: 5e5 * float(np.median(times)) for name, times in found.items()}


def break_ranks(fault: str, folder: Path, device: str, count: int, end: float) -> dict[str, Any]:
    """Kill or stop a rank during inferences, ``count`` times; return what each did to them."""
    from vla_ros.errors import DeviceLostError

    policy, trials = make_policy("small", folder, device, 2), list[dict[str, Any]]()
    random, turn = np.random.default_rng(os.getpid()), (folder / "turn").open("w")
    for _ in range(count):
        if time.monotonic() > end:
            break
        trial: dict[str, Any] = {}
        trials.append(trial)
        began = time.perf_counter()
        policy.load()
        trial["load_s"] = time.perf_counter() - began
        camera, session, pids = Camera(policy), policy.start_session(), policy._ranks.pids
        camera.infer(policy, session, 0)
        when: list[float] = []

        def hit(pid: int = pids[0], when: list[float] = when, wait: float = random.uniform(0.05, 0.4)) -> None:
            time.sleep(wait)
            when.append(time.perf_counter())
            os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)

        fcntl.flock(turn, fcntl.LOCK_EX)  # the processes of several trials would wait for each other's kernels
        threading.Thread(target=hit).start()
        try:
            while time.perf_counter() - began < 60:
                camera.infer(policy, session, 1)
            trial["error"] = "none"
        except DeviceLostError as error:
            trial["s"] = time.perf_counter() - when[0]
            trial["error"] = str(error)
        fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            camera.infer(policy, session, 2)
            trial["usable"] = True
        except DeviceLostError:
            trial["usable"] = False
        time.sleep(0.1)
        trial["left"] = [pid for pid in pids if alive(pid)]
        trial["good"] = "rank 1" in trial["error"] and not trial["usable"] and not trial["left"]
    policy.load()
    camera.infer(policy, policy.start_session(), 0)
    policy.close()
    return {"trials": trials, "reloads": True}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start(name: str, env: dict[str, str] | None = None, **settings: object) -> Any:
    """Run a part of this benchmark in a process of its own; its last line of output is its result."""
    command = [sys.executable, __file__, "--part", json.dumps({"name": name, **settings}, default=str)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})


def result_of(process: Any, limit: float) -> dict[str, Any]:
    try:
        out, _ = process.communicate(timeout=max(1.0, limit))
        return dict(json.loads(out.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        process.kill()
        return {"failed": f"took over {limit:.0f} s"}
    except (IndexError, ValueError):
        return {"failed": f"exited with status {process.returncode}"}


def part(name: str, **settings: Any) -> dict[str, Any]:
    """Run a part, in its own process."""
    folder = Path(settings.pop("folder", "."))
    if name == "write":
        write(folder, **settings)
        return {}
    if name == "reduce":
        return reduce(folder=folder, **settings)
    if name == "messages":
        return messages()
    if name == "shard":
        return shard(**settings)
    if name in FAULTS:
        return break_ranks(name, folder, **settings)
    return compare(name, folder, **settings)


def measure_reduces(limit: float) -> dict[str, dict[str, Any]]:
    found = {}
    for name, setting in SETTINGS.items():
        with tempfile.TemporaryDirectory() as meeting:
            both = [start("reduce", setting, folder=meeting, rank=rank) for rank in range(2)]
            found[name] = result_of(both[0], limit)
            result_of(both[1], 2)
        print(f"all-reduces, {name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def measure_rows(
    rows: Sequence[str], folder: Path, device: str, steps: int, end: float
) -> dict[str, dict[str, Any]]:
    """Let all rows load at once; then compare and time one after the other."""
    found = {}
    processes = {row: start(row, folder=folder, device=device, steps=steps) for row in rows}

    def is_ready(row: str) -> bool:
        return (folder / f"gate_{row}.ready").exists() or processes[row].poll() is not None

    while time.monotonic() < end - 30 and not all(map(is_ready, rows)):
        time.sleep(0.2)
    print(f"loaded after {time.monotonic() - BEGAN:.0f} s", file=sys.stderr, flush=True)
    for row, process in processes.items():
        (folder / f"gate_{row}").touch()
        found[row] = result_of(process, max(10.0, min(60.0, end - time.monotonic())))
        print(f"{row} ({time.monotonic() - BEGAN:.0f} s): {json.dumps(found[row])}", file=sys.stderr, flush=True)
    return found


def measure_faults(folder: Path, device: str, count: int, end: float) -> dict[str, list[dict[str, Any]]]:
    """Run the trials of each fault in several processes at once."""
    at_once = min(4, count)
    processes = [
        (fault, start(fault, folder=folder, device=device, count=-(-count // at_once), end=end - 20))
        for fault in FAULTS
        for _ in range(at_once)
    ]
    found: dict[str, list[dict[str, Any]]] = {fault: [] for fault in FAULTS}
    for fault, process in processes:
        found[fault].append(result_of(process, end - time.monotonic()))
    for fault, several in found.items():
        print(f"{fault}: {json.dumps(several)}", file=sys.stderr, flush=True)
    return found


def render(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table."""
    import torch

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    nccl: Any = torch.cuda.nccl
    version = ".".join(map(str, nccl.version())) if torch.cuda.is_available() else ""
    yield f"2 x {name}, torch {torch.__version__}, NCCL {version}, {time.monotonic() - BEGAN:.0f} s"
    reduces = found.get("reduce", {})
    if reduces:
        yield f"{'all-reduce in a graph, us':<28}" + "".join(f"{size:>10}" for size in SIZES)
        for setting, times in reduces.items():
            cells = (f"{times[size]:10.1f}" if size in times else f"{'-':>10}" for size in SIZES)
            yield f"  {setting:<26}" + "".join(cells)
    if "messages" in found:
        yield f"an order reaches another process after, us: {found['messages']}"
    for name, result in found.get("shard", {}).items():
        yield f"decoder, {name} GPUs, us a layer without all-reduces: {result}"
    for row, result in found.get("rows", {}).items():
        if "ms" not in result:
            yield f"{row}: {result}"
            continue
        one, two = result["ms"]
        aim = f", target {TARGETS[row]}" if row in TARGETS else ""
        yield f"{row}: {one:.2f} ms on one GPU, {two:.2f} on two: {two / one:.3f}{aim}; p99 {result['p99']}"
        for stage in result["stages"][0]:
            before, after = (stages.get(stage, 0.0) for stages in result["stages"])
            yield f"  {stage:<12}{before:8.2f}{after:8.2f}{floor(row, stage, reduces)}"
        if "drafted" in result:
            yield "  right drafts{:8.2f}{:8.2f}".format(*result["drafted"])
        keys = ("answers", "differ", "compared", "equal", "tie_margins", "median_margin", "largest_difference",
                "spread", "repeats", "memory_gb", "load_s")  # fmt: skip
        yield "  " + ", ".join(f"{key} {result[key]}" for key in keys if key in result)
        yield f"  plan per GPU: {result['plan']}"
    for fault, several in found.get("faults", {}).items():
        trials = [trial for one in several for trial in one.get("trials", [])]
        failed = [one["failed"] for one in several if "failed" in one]
        good, times = sum(trial.get("good", False) for trial in trials), [one["s"] for one in trials if "s" in one]
        reloads = sum(one.get("reloads", False) for one in several)
        yield (
            f"{fault}: {good} of {len(trials)} good, error after {min(times, default=0):.2f} to "
            f"{max(times, default=0):.2f} s, {reloads} of {len(several)} processes could load again at the end"
            f"{', failed: ' + str(failed) if failed else ''}"
        )
        if trials:
            yield f"  {trials[-1].get('error')}"


def floor(row: str, stage: str, reduces: dict[str, Any]) -> str:
    """Describe the all-reduces of a stage and how long they take by themselves."""
    count, size = {"prefill": (1, "288 rows"), "decode": (6, "1 row"), "infer": (1, "640 rows")}.get(stage, (0, ""))
    each = reduces.get("as run", {}).get(size)
    if not count or (stage == "infer" and row != "oft"):
        return ""
    count *= 2 * LAYERS
    return f"   {count} all-reduces" + ("" if each is None else f", {count * each / 1e3:.2f} ms by themselves")


def roomy() -> Path:
    """Return the first folder with room for the checkpoints."""
    folders = [Path("/dev/shm"), Path(tempfile.gettempdir()), Path.cwd()]
    return next((one for one in folders if shutil.disk_usage(one).free > 24e9), folders[1])


BEGAN = time.monotonic()


def main() -> None:
    if sys.argv[1:2] == ["--part"]:
        try:
            found = part(**json.loads(sys.argv[2]))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        print(json.dumps(found), flush=True)
        os._exit(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where 16 GB fit; by default memory, else a disk")
    parser.add_argument("--device", default="cuda:0", help="the first GPU, or cpu")
    parser.add_argument("--small", action="store_true", help="a small model instead of published sizes")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--faults", type=int, default=20, help="of each kind")
    parser.add_argument("--seconds", type=float, default=260.0, help="after which what is left is left out")
    parser.add_argument("--only", default=",".join([*ROWS, "reduce", "faults"]))
    options = parser.parse_args()
    only, end, found = options.only.split(","), BEGAN + options.seconds, dict[str, Any]()
    with tempfile.TemporaryDirectory(dir=options.folder or roomy()) as scratch:
        folder, device = Path(scratch), options.device
        if only == ["shard"]:
            options.small = True
        written = result_of(start("write", folder=folder, device=device, small=options.small), 120)
        print("write:", written, f"{time.monotonic() - BEGAN:.0f} s", file=sys.stderr, flush=True)
        if "reduce" in only:
            found["reduce"] = measure_reduces(30)
        if "shard" in only:
            found["shard"] = result_of(start("shard", device=device, seconds=options.seconds - 20), options.seconds)
        found["rows"] = {}
        if rows := [row for row in FIRST if row in only]:
            found["rows"] = measure_rows(rows, folder, device, options.steps, end - 80)
        if "faults" in only:
            found["messages"] = result_of(start("messages"), 20)
            found["faults"] = measure_faults(folder, device, options.faults, end - 20)
        if rows := [row for row in ROWS if row in only and row not in FIRST]:
            found["rows"] |= measure_rows(rows, folder, device, options.steps, end)
    print(json.dumps(found), file=sys.stderr)
    print("\n".join(render(found)))


if __name__ == "__main__":
    main()
