"""Measures how many observations of vla-eval's shards a server answers, against plain PyTorch in vla-eval's server.

python benchmarks/shards.py --record FILE                     in LIBERO's Python: 32 observations of an episode
python benchmarks/shards.py openvla-oft-7b pi05 --file FILE   32 shards, each a process, replay them for 30 s

The weights are random, of published sizes. ``serve`` is ``vla-ros serve``, ``fp8`` the same with FP8 weights.
``batch`` and ``single`` are vla-eval's ``PredictModelServer`` with batches around this package's plain PyTorch, run
eagerly in bfloat16: the first computes a batch at once, the second one observation after the other. Their only
preprocessing is a resize on the GPU. All send the steps of a chunk one by one, as many as published evaluations
execute.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
STEPS = 162
"""Steps of an episode: the mean of the 1,693 demonstrations in openpi's LIBERO dataset."""
EPISODES = 2000
CHUNKS = {"openvla-oft-7b": 8, "tiny-oft": 8, "pi05": 5, "tiny-pi05": 5}
"""Model to the steps executed of a chunk."""
SMALL = Path(__file__).parents[1] / "checkpoints" / "libero"
INSTRUCTION = "pick up the black bowl next to the plate and place it on the plate"
FILES = ("config.json", "policy_preprocessor.json", "tokenizer.json")
WARM_UP = 3.0  # s
PROMPT = 60
"""Tokens of a prompt of plain PyTorch; ``vla-ros serve`` encodes the instruction."""


async def record(path: Path) -> None:
    """Record every fourth observation of random actions, as the benchmark sends them."""
    from vla_eval.benchmarks.libero.benchmark import LIBEROBenchmark

    benchmark = LIBEROBenchmark(suite="libero_spatial", seed=7, send_wrist_image=True, send_state=True)
    await benchmark.start_episode({**benchmark.get_tasks()[0], "episode_idx": 0})
    draw, taken = np.random.default_rng(0), []
    for step in range(4 * 32):
        if step % 4 == 0:
            taken.append(await benchmark.get_observation())
        await benchmark.apply_action({"actions": [*draw.uniform(-0.5, 0.5, 6), -1.0]})
    images = np.array([list(one["images"].values()) for one in taken])
    np.savez(path, images=images, states=np.array([one["states"] for one in taken]))


def write_checkpoint(model: str, folder: Path, device: Any, dtype: Any) -> None:
    """Write a checkpoint for LIBERO with random weights."""
    from benchmarks.models.oft import MODELS
    from benchmarks.models.pi import random_network
    from benchmarks.models.subject import random_weights
    from tools.checkpoints.openvla import write_checkpoint as write_openvla
    from tools.checkpoints.vocabulary import PROMPT_WORDS, TABLE_WORDS, word_ids
    from vla_ros_models.oft.network import OFTModel
    from vla_ros_models.pi.architecture import PUBLISHED
    from vla_ros_models.pi.loading import LEROBOT_PREFIX, parameter_parts
    from vla_ros_models.weights import empty, write_shards

    if model in MODELS:
        architecture, layout, _, _ = MODELS[model]
        network = empty(lambda: OFTModel(architecture, layout))
        weights = dict(random_weights(network, device, dtype)([name for name, _ in network.named_parameters()]))
        ids = word_ids((*PROMPT_WORDS, *TABLE_WORDS), architecture.empty_token)
        groups = ("action", layout.action), ("proprio", layout.state)
        ranges = {name: {"q01": [-1.0] * size, "q99": [1.0] * size, "mask": [True] * size} for name, size in groups}
        write_openvla(folder, architecture, weights, {"libero_spatial": ranges}, ids, shards=4)
        return
    shutil.copytree(SMALL, folder, ignore=shutil.ignore_patterns("model.safetensors", "architecture.json"))
    sizes = replace(PUBLISHED[model], horizon=10)
    config, steps, words = (json.loads((folder / name).read_text()) for name in FILES)
    config |= {"image_resolution": [224, 224], "chunk_size": sizes.horizon, "n_action_steps": CHUNKS[model]}
    config |= {"num_inference_steps": 10, "rtc_training_max_delay": 0, "tokenizer_max_length": 200}
    config |= {"max_state_dim": sizes.action_dim, "max_action_dim": sizes.action_dim}
    steps["steps"][-1]["config"]["max_length"] = 200
    known = words["model"]["vocab"]
    known |= {f"<unused{number}>": number for number in range(len(known), sizes.vocabulary)}
    for name, content in zip(FILES, (config, steps, words), strict=True):
        (folder / name).write_text(json.dumps(content))
    parameters, stored = dict(random_network(sizes, device, dtype).named_parameters()), {}
    for name, parts in parameter_parts(sizes, ()).items():
        rows = parameters[name].detach().reshape(-1, *parts[0].shape[1:])
        split = rows.split([part.shape[0] for part in parts])
        stored |= {LEROBOT_PREFIX + part.name: one.clone() for part, one in zip(parts, split, strict=True)}
    write_shards(folder, [list(stored)], lambda names: ((name, stored[name]) for name in names))


Compute = Callable[[Any], Any]
"""Images uint8 [B, 2, 224, 224, 3] on the device to chunks [B, H, D]."""


def plain_torch(model: str, device: Any, dtype: Any) -> dict[str, Compute]:
    """Return plain PyTorch over one set of random weights, with batches and without."""
    import torch

    from benchmarks.models import oft, pi
    from benchmarks.models.plain_pi import PlainPi
    from benchmarks.models.subject import make_prompt, random_weights
    from vla_ros_models.engine.runner import make_runner
    from vla_ros_models.engine.weights import as_loaded
    from vla_ros_models.oft.inference import ChunkInference, ChunkRequest, plain_inference
    from vla_ros_models.oft.network import OFTModel
    from vla_ros_models.pi.architecture import PROMPT_TOKENS, PUBLISHED
    from vla_ros_models.weights import empty, fill

    if model in oft.MODELS:
        architecture, layout, _, _ = oft.MODELS[model]
        network = empty(lambda: OFTModel(architecture, layout))
        fill(network, random_weights(network, device, dtype), device, dtype)
        prompt, zeros = make_prompt(architecture, PROMPT), np.zeros(layout.state)

        def encode(images: Any, film: Any) -> Any:
            return network.embed_image(network.normalize(images), film)

        runner, weights = make_runner(device, graphs=False), as_loaded(network.language_model)
        padded = ChunkInference(network, weights, network.ops, encode, runner)  # so that observations share a pass

        def chunks(engine: ChunkInference, images: Any) -> Any:
            asked = [ChunkRequest(list(one), prompt, zeros) for one in images.cpu().numpy()]
            return [chunk.normalized for chunk in engine.answer_all(asked)]

        return {"batch": partial(chunks, padded), "single": partial(chunks, plain_inference(network))}
    tiny = model.startswith("tiny")
    sizes = replace(PUBLISHED["pi05"], horizon=10, **(pi.TINY if tiny else {}))
    plain = PlainPi(pi.random_network(sizes, device, dtype), 10)
    tokens = torch.randint(3, sizes.vocabulary, (1, PROMPT_TOKENS["pi05"]), device=device)

    def together(images: Any) -> Any:
        count = len(images)
        length = torch.full((count,), PROMPT, device=device)
        state = torch.zeros(count, sizes.action_dim, device=device)
        noise = torch.randn(count, sizes.horizon, sizes.action_dim, device=device)
        return plain.batch(images, tokens.expand(count, -1), length, state, noise).cpu().numpy()

    return {"batch": together, "single": lambda images: [together(one)[0] for one in images.split(1)]}


def serve_plain(model: str, port: int, most: int) -> None:
    """Serve plain PyTorch with vla-eval's own server: with batches at ``port``, without at the next one."""
    import anyio
    import torch
    from torch.nn.functional import interpolate
    from vla_eval.model_servers.predict import PredictModelServer
    from vla_eval.model_servers.serve import serve_async
    from vla_eval.specs import RAW

    device, dtype = target()

    class Plain(PredictModelServer):
        def __init__(self, compute: Compute) -> None:
            super().__init__(chunk_size=CHUNKS[model], max_batch_size=most)
            self._compute = compute
            images = dict.fromkeys("ab", np.zeros((256, 256, 3), np.uint8))
            for count in (1, most):
                self.predict_batch([{"images": images}] * count, [])

        def get_action_spec(self) -> Any:
            return {"actions": RAW}

        get_observation_spec = get_action_spec

        def predict_batch(self, obs_batch: Any, ctx_batch: Any) -> Any:
            images = torch.from_numpy(np.array([list(one["images"].values()) for one in obs_batch])).to(device)
            large = images.flatten(0, 1).permute(0, 3, 1, 2).float()
            small = interpolate(large, (224, 224), mode="bilinear", antialias=True).round().to(torch.uint8)
            seen = small.permute(0, 2, 3, 1).contiguous().unflatten(0, images.shape[:2])
            return [{"actions": chunk} for chunk in self._compute(seen)]

    async def serve() -> None:
        async with anyio.create_task_group() as group:
            for number, server in enumerate(servers):
                group.start_soon(serve_async, server, "127.0.0.1", port + number)

    servers = [Plain(compute) for compute in plain_torch(model, device, dtype).values()]
    anyio.run(serve)


def target() -> tuple[Any, Any]:
    """Return the device and the data type of plain PyTorch and of the checkpoint."""
    import torch

    cuda = torch.cuda.is_available()
    return torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32


def shard(url: str, path: Path, number: int, seconds: float, ready: Any, found: Any) -> None:
    """Replay observations; put (ms of each answer within ``seconds``) into ``found``."""
    from vla_eval.protocol.messages import Message, MessageType, make_hello_payload, pack_message, unpack_message
    from websockets.sync.client import connect

    with np.load(path) as recorded:
        shown = list(zip(recorded["images"], recorded["states"], strict=True))
    shown = shown[number % len(shown) :] + shown[: number % len(shown)]
    messages = [
        pack_message(
            Message(
                MessageType.OBSERVATION,
                {"images": {"agentview": a, "wrist": b}, "states": state, "task_description": INSTRUCTION},
                seq,
            )
        )
        for seq, ((a, b), state) in enumerate(shown)
    ]
    begins = pack_message(Message(MessageType.EPISODE_START, {"task": {"name": INSTRUCTION}}))
    taken: list[float] = []
    with connect(url, compression=None, max_size=None, proxy=None, open_timeout=60) as link:
        link.send(pack_message(Message(MessageType.HELLO, make_hello_payload(benchmark="replay"))))
        link.recv()
        ready.wait()
        began = time.perf_counter() + WARM_UP
        step = number * STEPS // 32  # shards begin episodes at different times
        link.send(begins)
        while time.perf_counter() < began + seconds:
            asked = time.perf_counter()
            link.send(messages[step % len(messages)])
            answer = unpack_message(link.recv())
            if answer.type is not MessageType.ACTION:
                raise SystemExit(f"shard {number}: {answer.payload}")
            if began <= asked and time.perf_counter() < began + seconds:
                taken.append(1e3 * (time.perf_counter() - asked))
            step += 1
            if step % STEPS == 0:
                link.send(begins)
    found.put(taken)


def measure(url: str, path: Path, shards: int, seconds: float) -> dict[str, float]:
    """Run the shards; return answers per second and their times."""
    context = multiprocessing.get_context("spawn")
    ready, found = context.Barrier(shards), context.Queue()
    running = [
        context.Process(target=shard, args=(url, path, number, seconds, ready, found), daemon=True)
        for number in range(shards)
    ]
    for one in running:
        one.start()
    each = [found.get(timeout=180 + seconds) for _ in running]
    times = np.concatenate(each)
    rate = len(times) / seconds
    p50, p99 = np.percentile(times, (50, 99))
    return {
        "answers_per_s": round(rate, 1), "p50_ms": round(p50, 1), "p99_ms": round(p99, 1),
        "fewest": min(map(len, each)), "most": max(map(len, each)),
        "minutes_for_2000_episodes": round(EPISODES * STEPS / rate / 60, 1),
    }  # fmt: skip


def healthy(port: int) -> bool:
    """Return True once the server has loaded its weights."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        return bool(opener.open(f"http://127.0.0.1:{port}/health", timeout=2).status == 200)
    except OSError:
        return False


def bench(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Start all servers of all models, and measure one after the other."""
    began, urls, results = time.perf_counter(), dict[tuple[str, str], tuple[int, str]](), []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.scratch)))

        def start(name: str, *words: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context((arguments.logs / f"{name}.log").open("wb"))
            process = subprocess.Popen(words, stdout=log, stderr=log)
            stack.callback(process.kill)
            return process

        most = ("--max-batch", str(arguments.max_batch))
        writing, folders = [], {}
        for model in arguments.models:
            folders[model] = SMALL if model == "tiny-pi05" else scratch / model
            own = (sys.executable, __file__, model)
            if folders[model] != SMALL:
                writing.append(start(f"{model}.write", *own, "--write", str(folders[model])))
            port = arguments.port + 10 * len(folders)
            start(f"{model}.plain", *own, "--plain", "--port", str(port), *most)
            urls |= {(model, "batch"): (port, ""), (model, "single"): (port + 1, "")}
        if any(process.wait() for process in writing):
            raise SystemExit(f"a checkpoint was not written; see {arguments.logs}")
        for number, model in enumerate(arguments.models):
            words = [sys.executable, "-m", "vla_ros.cli", "serve", "--checkpoint", str(folders[model]), *most]
            words += ["--policy", "oft" if "oft" in model else "pi", "-p", "preset:=libero"]
            words += ["-p", "policy.self_test:=false"]
            words += ["-p", 'features.images:=["image = agent","wrist_image = wrist"]']
            for kind, more in {"serve": (), "fp8": ("-p", "policy.quantization:=fp8")}.items():
                if kind == "serve" or arguments.fp8:
                    port = arguments.port + 10 * (number + 1) + 2 + len(more)
                    start(f"{model}.{kind}", *words, "--port", str(port), *more)
                    urls[model, kind] = port, "/vla-eval"
        while not all(healthy(port) for port, _ in urls.values()):
            if time.perf_counter() > began + arguments.patience:
                missing = [name for name, (port, _) in urls.items() if not healthy(port)]
                raise SystemExit(f"not started: {missing}; see {arguments.logs}")
            time.sleep(0.5)
        print(f"{time.perf_counter() - began:.0f} s: all servers are up", flush=True)
        for (model, kind), (port, path) in sorted(urls.items()):
            result = {"model": model, "server": kind, "shards": arguments.shards, "seconds": arguments.seconds}
            result |= {"steps_per_chunk": CHUNKS[model], "steps_per_episode": STEPS}
            result["cpus"] = len(os.sched_getaffinity(0))
            result |= measure(f"ws://127.0.0.1:{port}{path}", arguments.file, arguments.shards, arguments.seconds)
            print(json.dumps(result), flush=True)
            results.append(result)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("models", nargs="*", help=", ".join(CHUNKS))
    add("--file", type=Path, help="observations that --record wrote")
    add("--record", type=Path, metavar="FILE")
    add("--fp8", action="store_true", help="also vla-ros serve with FP8 weights")
    add("--shards", type=int, default=32)
    add("--seconds", type=float, default=30.0)
    add("--max-batch", type=int, default=16)
    add("--scratch", help="folder for the checkpoints (24 GB), such as /dev/shm")
    add("--logs", type=Path, default=Path(), help="folder for the servers' logs")
    add("--patience", type=float, default=600.0, help="seconds until all servers must be up")
    add("--port", type=int, default=18800)
    add("--json", type=Path, metavar="FILE")
    add("--write", type=Path, help=argparse.SUPPRESS)
    add("--plain", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.record:
        asyncio.run(record(arguments.record))
    elif arguments.write:
        write_checkpoint(arguments.models[0], arguments.write, *target())
    elif arguments.plain:
        serve_plain(arguments.models[0], arguments.port, arguments.max_batch)
    else:
        bench(arguments)


if __name__ == "__main__":
    main()
