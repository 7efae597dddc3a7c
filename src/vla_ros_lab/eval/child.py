"""Drives benchmarks of vla-eval in their own Python, on requests from a socket: ``PY child.py FD``.

Needs only vla-eval, with its NumPy and msgpack, in that Python (3.8 or newer), and imports nothing of this package.
A request and its answer are a length of 8 bytes and a msgpack map; arrays are maps ``{__ndarray__, data, dtype,
shape}``.
An answer with ``error`` says what a benchmark raised; what it unpickles stays in this process.
"""

from __future__ import annotations

import sys

sys.path[0] = ""  # modules of the folder from which the command was started, not those beside this file

import asyncio  # noqa: E402
import inspect  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import socket  # noqa: E402
import struct  # noqa: E402
import traceback  # noqa: E402
from typing import Any  # noqa: E402

import msgpack  # noqa: E402
import numpy as np  # noqa: E402

_LENGTH = struct.Struct(">Q")
_MAX_STEPS = 300  # of vla-eval's orchestrator, for a benchmark that states none


class Child:
    """The benchmarks of one configuration, each constructed when first used. One thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.entries: list[Any] = []
        self.built: dict[int, Any] = {}
        self.tasks: list[list[dict[str, Any]]] = []

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Read the configuration and construct its benchmarks; answer what they say about themselves."""
        from vla_eval import __version__
        from vla_eval.cli.config_loader import load_config
        from vla_eval.config import EvalConfig

        config: dict[str, Any] = {"benchmarks": [{"benchmark": request["benchmark"]}]}
        if request["file"]:
            config = load_config(request["file"])
        self.render, self.offered = config.get("render"), request["observation_params"]
        for raw in config.get("benchmarks") or []:
            entry = {**raw, "params": {**(raw.get("params") or {}), **request["params"]}}
            self.entries.append(EvalConfig.from_dict(entry))
        found = [self.describe(index, entry) for index, entry in enumerate(self.entries)]
        return {"version": __version__, "benchmarks": found}

    def describe(self, index: int, entry: Any) -> dict[str, Any]:
        benchmark = self.benchmark(index)
        metadata = benchmark.get_metadata()
        tasks = list(benchmark.get_tasks())
        if entry.tasks:
            tasks = [task for task in tasks if task.get("suite") in entry.tasks or task.get("name") in entry.tasks]
        self.tasks.append(tasks[: entry.max_tasks or None])
        found = {
            "name": entry.resolved_name(),
            "tasks": [str(task.get("name", task)) for task in self.tasks[index]],
            "episodes": entry.episodes_per_task,
            "most_episodes": metadata.get("max_episodes_per_task"),
            "max_steps": entry.max_steps or metadata.get("max_steps") or _MAX_STEPS,
            "metric_keys": benchmark.get_metric_keys(),
            "config": entry.to_dict(),
        }
        for which in ("action_spec", "observation_spec"):
            try:
                spec = getattr(benchmark, "get_" + which)()
            except NotImplementedError:  # vla-eval's base class: there is none
                spec = {}
            found[which] = {key: value.to_dict() for key, value in spec.items()}
        plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
        return plain

    def benchmark(self, index: int) -> Any:
        """Return the benchmark of an entry; only the last one used is kept."""
        if index not in self.built:
            from vla_eval.registry import resolve_import_string
            from vla_eval.render import apply_render_mode, normalize_render_mode

            self.cleanup()
            entry = self.entries[index]
            kind = resolve_import_string(entry.benchmark)
            apply_render_mode(kind, normalize_render_mode(self.render), entry.resolved_name())
            names = {name for each in kind.__mro__[:-1] for name in inspect.signature(each.__init__).parameters}
            offered = {name: value for name, value in self.offered.items() if name in names}
            self.built[index] = kind(**{**offered, **entry.params})
            if index < len(self.tasks):  # built again: some, such as LIBERO, can begin none before this call
                self.built[index].get_tasks()
        return self.built[index]

    def start(self, request: dict[str, Any]) -> dict[str, Any]:
        """Begin an episode; answer its first observation."""
        self.current = self.benchmark(request["entry"])
        task = {**self.tasks[request["entry"]][request["task"]], "episode_idx": request["episode"]}
        self.loop.run_until_complete(self.current.start_episode(task))
        return {"observation": self.observation()}

    def step(self, request: dict[str, Any]) -> dict[str, Any]:
        """Apply an action; answer the observation, which is None at the end, and the result so far."""
        action = {"actions": np.array(request["action"], dtype=np.float64)}
        self.loop.run_until_complete(self.current.apply_action(action))
        done = bool(self.loop.run_until_complete(self.current.is_done()))
        result = json.loads(json.dumps(self.loop.run_until_complete(self.current.get_result()), default=_plain))
        return {"done": done, "result": result, "observation": None if done else self.observation()}

    def hold(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer the benchmark's own hold action, or None if it has none."""
        last = request["action"] and {"actions": np.array(request["action"], dtype=np.float64)}
        try:
            held = self.current.get_hold_action(last)
        except NotImplementedError:  # vla-eval's base class: there is none
            return {"action": None}
        return {"action": np.asarray(held["actions"], dtype=np.float64).tolist()}

    def observation(self) -> dict[str, Any]:
        """Return images, instruction and every vector of numbers of the current observation."""
        raw = self.loop.run_until_complete(self.current.get_observation())
        images = {str(name): np.asarray(image) for name, image in raw.get("images", {}).items()}
        vectors = {}
        for name, value in raw.items():
            if name not in ("images", "task_description"):
                vector = np.asarray(value)
                if vector.ndim == 1 and vector.dtype.kind in "biuf":
                    vectors[str(name)] = vector.astype(np.float64)
        return {"images": images, "instruction": str(raw.get("task_description", "")), "vectors": vectors}

    def cleanup(self) -> None:
        for benchmark in self.built.values():
            benchmark.cleanup()
        self.built.clear()


def _told(error: BaseException) -> str:
    """Return what was raised, and why."""
    why = error.__cause__ or error.__context__
    return f"{type(error).__name__}: {error}" + (f" ({_told(why)})" if why else "")


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        shape = list(value.shape)
        return {"__ndarray__": True, "data": value.tobytes(), "dtype": value.dtype.str, "shape": shape}
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _read(link: socket.socket, size: int) -> bytes:
    """Read ``size`` bytes; b"" once the command has ended."""
    data = bytearray()
    while len(data) < size:
        part = link.recv(min(size - len(data), 1 << 20))
        if not part:
            return b""
        data += part
    return bytes(data)


def main() -> None:
    link, child = socket.socket(fileno=int(sys.argv[1])), Child()
    while True:
        head = _read(link, _LENGTH.size)
        request = msgpack.unpackb(_read(link, *_LENGTH.unpack(head))) if head else {"do": "close"}
        if request["do"] == "close":
            break
        try:
            body = msgpack.packb(getattr(child, request["do"])(request), default=_encode)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            body = msgpack.packb({"error": _told(error)})
        link.sendall(_LENGTH.pack(len(body)) + body)
    child.cleanup()
    sys.stdout.flush()
    os._exit(0)  # without the simulators' own end, which hangs in some


if __name__ == "__main__":
    main()
