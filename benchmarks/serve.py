"""Measures the policy server: throughput and fairness with many robots, and the overhead of one request.

python benchmarks/serve.py --robots 200                   a policy that sleeps, in a process of its own
python benchmarks/serve.py --robots 32 --server ws://H:P  a running server
python benchmarks/serve.py --overhead [--openpi FOLDER]   time of a request beyond inference, in turn with openpi's
                                                          if FOLDER has openpi_client and openpi.serving
"""

import argparse
import asyncio
import contextlib
import json
import logging
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from websockets.asyncio.client import connect

from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.errors import VlaRosError
from vla_ros.policies.base import Policy, Session
from vla_ros.policies.remote.dialect import Request
from vla_ros.policies.remote.dialects import OPENPI
from vla_ros.policies.remote.link import Link
from vla_ros.policies.remote.messages import pack, unpack
from vla_ros.policies.remote.transport import Target
from vla_ros.process import keep_freed_memory
from vla_ros.types import ActionChunk, Observation

IMAGES = ("observation/exterior_image_1_left", "observation/wrist_image_left")
PLAIN: Any = {"compression": None, "max_size": None, "proxy": None}
_CHUNK = np.zeros((10, 8))


class Sleeping(Policy):
    """Sleeps once per batch and once per request, as if a GPU computed."""

    spec = PolicySpec(
        tuple(map(ImageFeature, IMAGES)), (StateFeature("observation/state", size=8),), dimension=8, horizon=10
    )

    def __init__(self, batch_ms: float, each_ms: float) -> None:
        self._batch, self._each = batch_ms / 1e3, each_ms / 1e3

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        return ActionChunk(_CHUNK, observation.stamp)

    def infer_batch(self, requests: Sequence[tuple[Any, Observation]]) -> list[ActionChunk | VlaRosError]:
        seconds = self._batch + self._each * len(requests)
        if seconds:
            time.sleep(seconds)
        return [ActionChunk(_CHUNK, observation.stamp) for _, observation in requests]


def request(size: int, seed: int = 0) -> dict[str, Any]:
    """Return two images, a state and an instruction."""
    generator = np.random.default_rng(seed)
    images = {key: generator.integers(0, 256, (size, size, 3), dtype=np.uint8) for key in IMAGES}
    return {**images, "observation/state": np.zeros(8, np.float32), "prompt": "pick up the fork"}


def requests(url: str, size: int, count: int = 8) -> list[bytes]:
    """Return requests that fit the server's metadata, each with other images."""
    from websockets.sync.client import connect as connect_once

    with connect_once(url, **PLAIN) as connection:
        said = unpack(connection.recv())
    generator = np.random.default_rng(0)
    state = {key: np.zeros(entry["size"] or 8, np.float32) for key, entry in said["state"].items()}
    images = [
        {
            key: generator.integers(0, 256, (*(entry["size"] or (size, size)), 3), dtype=np.uint8)
            for key, entry in said["images"].items()
        }
        for _ in range(count)
    ]
    return [pack({**shown, **state, "prompt": "pick up the fork"}) for shown in images]


def serve(arguments: argparse.Namespace) -> None:
    from vla_ros.serve import server
    from vla_ros.serve.cli import SWITCH_INTERVAL
    from vla_ros.serve.service import Limits, Service

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    sys.setswitchinterval(SWITCH_INTERVAL)
    if arguments.serve == "openpi":
        sys.path.insert(0, str(arguments.openpi))
        from openpi.serving.websocket_policy_server import WebsocketPolicyServer

        class Constant:
            def infer(self, observation: Any) -> Any:
                return {"actions": _CHUNK}

        print("ready", flush=True)
        WebsocketPolicyServer(Constant(), "127.0.0.1", arguments.port).serve_forever()
    policy = Sleeping(arguments.batch_ms, arguments.each_ms)
    service = Service(policy, Limits(arguments.max_batch, 4 * arguments.robots + 8, seconds=60.0))
    service.load()
    print("ready", flush=True)
    asyncio.run(server.run(service, server.Address(port=arguments.port), 10.0))
    service.close(10.0)


@contextlib.contextmanager
def process(arguments: argparse.Namespace, kind: str, port: int, *more: str) -> Iterator[str]:
    words = ["--serve", kind, "--port", str(port), "--max-batch", str(arguments.max_batch), *more]
    words += ["--robots", str(arguments.robots)]
    words += ["--openpi", str(arguments.openpi)] if arguments.openpi else []
    with subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            deadline = time.monotonic() + 10.0  # it says "ready" before it listens
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.05)
            yield f"ws://127.0.0.1:{port}"
        finally:
            server.terminate()


class Fleet:
    """Robots on one event loop, each with a connection."""

    def __init__(self, url: str, messages: Sequence[bytes]) -> None:
        self.url, self.messages = url, messages
        self.latencies: list[list[float]] = []
        self.lost = 0

    async def robot(self, number: int, until: float, connected: asyncio.Semaphore, go: asyncio.Event) -> None:
        """Send one request after the other for ``until`` seconds."""
        async with connect(self.url, **PLAIN, open_timeout=60) as connection:
            await connection.recv()
            connected.release()
            await go.wait()
            while time.perf_counter() < self.began + until:
                asked = time.perf_counter()
                await connection.send(self.messages[(number + len(self.latencies[number])) % len(self.messages)])
                answer = await connection.recv()
                if isinstance(answer, str) or b"actions" not in answer:
                    self.lost += 1
                    print(f"robot {number}: {str(answer)[:120]}", file=sys.stderr)
                else:
                    self.latencies[number].append(time.perf_counter() - asked)

    async def watch(self, seconds: float) -> None:
        for number in range(1, 1 + int(seconds // 20)):
            await asyncio.sleep(20)
            taken = [1e3 * each for robot in self.latencies for each in robot]
            p50, p99 = np.percentile(taken, (50, 99))
            found = f"{len(taken)} answers, p50 {p50:.1f} ms, p99 {p99:.1f} ms, {self.lost} lost"
            print(f"{20 * number} s: {found}", file=sys.stderr, flush=True)

    async def run(self, robots: int, seconds: float, watcher: IO[str]) -> None:
        """Run ``robots`` robots for ``seconds``; write a line to ``watcher`` when they begin."""
        self.latencies = [[] for _ in range(robots)]
        connected, go = asyncio.Semaphore(0), asyncio.Event()
        tasks = [asyncio.create_task(self.robot(each, seconds, connected, go)) for each in range(robots)]
        for _ in range(robots):
            await asyncio.wait_for(connected.acquire(), 60.0)
        self.began = time.perf_counter()
        go.set()
        print("go", file=watcher, flush=True)
        await asyncio.gather(*tasks, self.watch(seconds))
        self.took = time.perf_counter() - self.began


def fairness(counts: Sequence[int]) -> float:
    """Return Jain's index: 1 if all robots got the same number of answers, 1/n if one got all."""
    return sum(counts) ** 2 / (len(counts) * sum(count**2 for count in counts))


def alone(url: str, messages: Sequence[bytes], idle: int, count: int) -> float:
    """Return the median latency in ms of one robot while ``idle`` others are connected."""

    async def measure() -> float:
        async with contextlib.AsyncExitStack() as stack:
            connections = [await stack.enter_async_context(connect(url, **PLAIN)) for _ in range(idle + 1)]
            one, taken = connections[-1], []
            await one.recv()
            for number in range(count):
                asked = time.perf_counter()
                await one.send(messages[number % len(messages)])
                await one.recv()
                taken.append(1e3 * (time.perf_counter() - asked))
            return statistics.median(taken)

    return asyncio.run(measure())


def get(url: str, path: str) -> str:
    """Return the body of a GET request to the server at the websocket address ``url``."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http{url.removeprefix('ws')}{path}", timeout=10) as response:
        body: bytes = response.read()
    return body.decode()


def health(url: str) -> None:
    """Print latencies of ``GET /healthz`` in ms, ten a second, from the first line to the end of standard input.

    It runs in a process of its own so that it does not wait for the fleet's interpreter.
    """
    taken, ended = list[float](), threading.Event()
    sys.stdin.readline()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.wait(0.1):
        asked = time.perf_counter()
        get(url, "/healthz")
        taken.append(1e3 * (time.perf_counter() - asked))
    print(json.dumps(taken))


def metrics(url: str) -> dict[str, float]:
    lines = [line.split() for line in get(url, "/metrics").splitlines() if line[0] != "#"]
    return {name.removeprefix("vla_ros_serve_"): float(value) for name, value in lines}


def fleet(arguments: argparse.Namespace, url: str) -> dict[str, Any]:
    messages = requests(url, arguments.size)
    alone(url, messages, 0, 10)  # the first requests of a process are slower
    single = alone(url, messages, 0, 40)
    idle = alone(url, messages, arguments.robots - 1, 40)
    print(f"alone {single:.2f} ms, with idle robots {idle:.2f} ms", file=sys.stderr, flush=True)
    robots, before = Fleet(url, messages), metrics(url)
    with subprocess.Popen(
        [sys.executable, __file__, "--health", url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as watcher:
        assert watcher.stdin is not None
        asyncio.run(robots.run(arguments.robots, arguments.seconds, watcher.stdin))
        healths: list[float] = json.loads(watcher.communicate()[0])
    said = {name: value - before[name] for name, value in metrics(url).items() if name in before}
    batches = max(1.0, said.get("batch_count", 0.0))
    counts = [len(each) for each in robots.latencies]
    taken = np.sort(1e3 * np.concatenate([np.array(each) for each in robots.latencies]))
    p50, p99 = np.percentile(taken, (50, 99))
    return {
        "robots": arguments.robots,
        "seconds": round(robots.took, 1),
        "answers_per_second": round(sum(counts) / robots.took, 1),
        "p50_ms": round(float(p50), 1),
        "p99_ms": round(float(p99), 1),
        "p99_over_p50": round(float(p99 / p50), 2),
        "jain": round(fairness(counts), 4),
        "fewest": min(counts),
        "most": max(counts),
        "lost": robots.lost,
        "batch_mean": round(said.get("batch_sum", 0.0) / batches, 1),
        "inference_mean_ms": round(1e3 * said.get("inference_seconds_sum", 0.0) / batches, 1),
        "alone_ms": round(single, 2),
        "alone_with_idle_ms": round(idle, 2),
        "idle_ratio": round(idle / single, 2),
        "healthz_p50_ms": round(statistics.median(healths), 2) if healths else None,
        "healthz_p99_ms": round(float(np.percentile(healths, 99)), 2) if healths else None,
    }


def overhead(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time single requests to a policy that takes no time, alternating between the servers."""
    features = request(224)
    text = features.pop("prompt")
    message = Request(features, text)
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(
            process(arguments, "own", arguments.port or 18777, "--batch-ms", "0", "--each-ms", "0")
        )
        keep_freed_memory()  # as RemotePolicy does
        link = Link(Target(url, OPENPI))
        link.start(30.0)
        stack.callback(link.close)
        pairs = {"vla_ros": lambda: link.request(message, 10.0)}
        if arguments.openpi:
            sys.path.insert(0, str(arguments.openpi))
            from openpi_client.websocket_client_policy import WebsocketClientPolicy

            theirs = stack.enter_context(process(arguments, "openpi", 18778))
            client = WebsocketClientPolicy(theirs)
            pairs["openpi"] = lambda: client.infer({**features, "prompt": text})
        taken: dict[str, list[float]] = {name: [] for name in pairs}
        for turn in range(arguments.turns):
            for name, ask in pairs.items():
                for number in range(60):
                    asked = time.perf_counter()
                    ask()
                    if turn and number >= 10:
                        taken[name].append(1e3 * (time.perf_counter() - asked))
    return {
        name: {key: round(float(np.percentile(values, q)), 3) for key, q in (("p50", 50), ("p90", 90), ("p99", 99))}
        for name, values in taken.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--robots", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--size", type=int, default=224, help="pixels of an image's side")
    parser.add_argument("--server", help="a running server in place of a policy that sleeps")
    parser.add_argument("--batch-ms", type=float, default=30.0, help="time of a batch of the sleeping policy")
    parser.add_argument("--each-ms", type=float, default=1.0, help="additional time of each request")
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--openpi", type=Path)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--serve", choices=("own", "openpi"), help=argparse.SUPPRESS)
    parser.add_argument("--health", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments)
    elif arguments.health:
        health(arguments.health)
    elif arguments.overhead:
        print(json.dumps(overhead(arguments), indent=1))
    elif arguments.server:
        print(json.dumps(fleet(arguments, arguments.server), indent=1))
    else:
        more = "--batch-ms", str(arguments.batch_ms), "--each-ms", str(arguments.each_ms)
        with process(arguments, "own", arguments.port or 18776, *more) as url:
            print(json.dumps(fleet(arguments, url), indent=1))


if __name__ == "__main__":
    main()
