"""A benchmark of vla-eval as an environment of the node."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_ros.control.command import Command
from vla_ros.policies.remote.messages import described
from vla_ros.types import Float32Array, FloatArray, JointState, UInt8Array
from vla_ros_lab.eval.process import BenchmarkError, BenchmarkProcess
from vla_ros_lab.sim.environment import Environment, Measurements


@dataclass(frozen=True)
class Case:
    """A task and an initial state of a benchmark, with which an episode begins."""

    task: str  # its name; unique within the benchmark
    state: int  # number of the initial state, or the seed of the scene
    entry: int = 0  # position of the benchmark in its configuration
    index: int = 0  # position of the task in that benchmark


class BenchmarkEnvironment(Environment):
    """Drives the benchmarks of ``process`` through ``cases``: :meth:`reset` takes the position of one.

    Actions have the benchmark's own units (``control.output: environment``). Raises BenchmarkError if the process
    fails; the next :meth:`reset` starts it again.

    Attributes:
        sizes: Height and width of an observation's images, by name, after :meth:`probe`.
        vectors: Names and sizes of the vectors in an observation; they are state topics ``/NAME``.
        result: What the benchmark says about the episode; at least ``success``.
    """

    def __init__(self, process: BenchmarkProcess, cases: Sequence[Case], step_seconds: float = 0.05) -> None:
        self._process, self._cases, self.step_seconds = process, cases, step_seconds
        self._images: Mapping[str, UInt8Array | Float32Array] = {}
        self._vectors: Mapping[str, FloatArray] = {}
        self._expected: dict[str, tuple[int, ...]] = {}
        self._begun: int | None = None  # the case that is at its first observation
        self._action: FloatArray | None = None
        self._last: FloatArray | None = None
        self._hold = False
        self.result: Mapping[str, Any] = {}

    @property
    def vectors(self) -> Mapping[str, int]:
        return {name: len(vector) for name, vector in self._vectors.items()}

    def reset(self, seed: int) -> None:
        self.done, self.success, self.result = False, False, {}
        self._action = self._last = None
        if self._begun == seed:  # by :meth:`probe`
            self._begun = None
            return
        self._begun = None
        if not self._process.alive:
            self._process.start()
        case = self._cases[seed]
        request = {"do": "start", "entry": case.entry, "task": case.index, "episode": case.state}
        self._observe(self._process.ask(request)["observation"])

    def probe(self, seed: int) -> None:
        """Begin a case, to learn what observations contain; :meth:`reset` of the same case then continues it."""
        self.reset(seed)
        self._begun = seed
        self.sizes = {name: image.shape[:2] for name, image in self._images.items()}
        self.cameras = tuple(f"/{name}/image" for name in self.sizes)

    def _observe(self, found: Mapping[str, Any]) -> None:
        """Take an observation; raises BenchmarkError if its images and vectors are not those of the first one."""
        images, vectors = found["images"], found["vectors"]
        for name, image in images.items():
            kinds = (np.uint8, np.float32)  # an image, points
            if not isinstance(image, np.ndarray) or image.dtype not in kinds or image.shape[2:] != (3,):
                expected = "uint8 [H, W, 3], or points, float32 [H, W, 3]"
                raise BenchmarkError(f"image '{name}' is {described(image)}, expected {expected}")
        shapes = {name: value.shape for name, value in (*images.items(), *vectors.items())}
        if not self._expected and not images:
            raise BenchmarkError(f"an observation has no images, only {', '.join(vectors) or 'text'}")
        self._expected = self._expected or shapes
        if shapes != self._expected:
            names = sorted(shapes.keys() | self._expected.keys())
            name = next(name for name in names if shapes.get(name) != self._expected.get(name))
            before = self._expected.get(name, "nothing")
            raise BenchmarkError(f"'{name}' is {shapes.get(name, 'missing')}, in the first episode it was {before}")
        self._images, self._vectors, self.instruction = images, vectors, found["instruction"]

    def observe(self, cameras: Collection[str], stamp: int) -> Measurements:
        """Return the images and vectors of the last step; there are no joint states."""
        images = {topic: self._images[topic.split("/")[1]] for topic in cameras}
        names = {name: tuple(map(str, range(size))) for name, size in self.vectors.items()}
        state = {f"/{name}": JointState(names[name], values, stamp) for name, values in self._vectors.items()}
        return Measurements([], images, state)

    def apply(self, command: Command) -> None:
        if command.action is None:
            raise BenchmarkError("a command has no action; set control.output to environment")
        before = np.full(len(command.action), np.nan) if self._action is None else self._action
        self._action, self._hold = np.where(np.isnan(command.action), before, command.action), command.hold

    def step(self) -> None:
        """Execute the action for a control step; a hold is the benchmark's own if it has one."""
        action, self._action = self._action, None
        if self._hold or action is None:
            last = None if self._last is None else self._last.tolist()
            own = self._process.ask({"do": "hold", "action": last})["action"]
            action = action if own is None else np.array(own)
        if action is None or not np.isfinite(action).all():
            raise BenchmarkError("no action is known that keeps the arm, and the benchmark has no hold action")
        self._last = action
        answer = self._process.ask({"do": "step", "action": action.tolist()})
        self.result, self.done = answer["result"], bool(answer["done"])
        self.success = bool(self.result.get("success"))
        if answer["observation"] is not None:
            self._observe(answer["observation"])

    def summary(self) -> Mapping[str, Any]:
        return {"metrics": self.result}

    def close(self) -> None:
        self._process.close()
