"""Many episodes in a short time: simulations in their own processes, one network that answers them in batches.

Everything else is the demo's own: the camera's pictures come upside down and are prepared by :mod:`vla_ros.vision`,
actions go through the node's controller, and the options are those of the ``vla-ros demo`` command line.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from tools.train.episode import make_controller, run_episode
from tools.train.recipe import DATASET
from vla_ros.config import Config
from vla_ros.errors import VlaRosError
from vla_ros.policies.openvla.actions import ActionBins, ActionStatistics
from vla_ros.sim import demo
from vla_ros.sim.scene import Scene, shuffled_instruction, switched
from vla_ros.sim.world import TableTop
from vla_ros.types import ActionChunk, ActionSpec, IntArray, Observation, UInt8Array
from vla_ros.vision.preprocess import Preprocessor, process

Ask = Callable[[UInt8Array, str], IntArray]
"""From a prepared picture and an instruction to action tokens."""


@dataclass(frozen=True)
class Rollout:
    """One episode.

    Attributes:
        seed: Seed of the scene.
        success: True where the named object was lifted.
        reason: As :class:`~vla_ros.sim.results.EpisodeResult` has it.
        steps: Control steps.
        tokens: Int64 [steps, 7], what the network said.
    """

    seed: int
    success: bool
    reason: str
    steps: int
    tokens: IntArray


@dataclass(frozen=True)
class Meaning:
    """What turns tokens into actions.

    Attributes:
        spec: Of the policy.
        bins: Tokens to normalised values.
        statistics: Normalised values to metres and radians.
    """

    spec: ActionSpec
    bins: ActionBins
    statistics: ActionStatistics


def read_words(checkpoint: Path, words: Sequence[str]) -> argparse.Namespace:
    """Arguments of ``vla-ros demo`` with the OpenVLA policy and this checkpoint."""
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    given = ("--policy", "openvla", "--checkpoint", str(checkpoint), "-p", f"policy.unnorm_key:={DATASET}")
    return parser.parse_args([*given, *words])


class Simulation:
    """One table-top that runs the episodes of a demo command line without a graph.

    Args:
        arguments: From :func:`read_words`.
        meaning: Of the policy's tokens.
    """

    def __init__(self, arguments: argparse.Namespace, meaning: Meaning) -> None:
        self._arguments = arguments
        self._meaning = meaning
        config: Config = demo.plan(arguments).config
        self._preprocessor = Preprocessor(config.camera, meaning.spec)
        self._controller = make_controller(meaning.spec, config)
        self._world = TableTop(demo.world_options(arguments, config))

    def close(self) -> None:
        """Free the renderer."""
        self._world.close()

    def run(self, seed: int, ask: Ask) -> Rollout:
        """One episode."""
        options = self._arguments
        said: list[IntArray] = []
        words = ""

        def answer(observation: Observation) -> ActionChunk:
            nonlocal words
            scene: Scene = self._world.scene
            if not said:
                words = shuffled_instruction(scene) if options.shuffle else scene.instruction
            if options.switch_at and len(said) == options.switch_at:
                scene = switched(scene)
                self._world.judge_by(scene)
                words = scene.instruction
            shown = observation.images["image"]
            picture = np.zeros_like(shown) if options.blank else shown
            tokens = ask(process(self._preprocessor.raw(np.ascontiguousarray(picture[::-1, ::-1]))), words)
            said.append(tokens)
            action = self._meaning.statistics.unnormalize(self._meaning.bins.decode(tokens))
            return ActionChunk(actions=action[None], stamp=observation.stamp, tokens=tokens)

        result = run_episode(self._world, answer, self._controller, seed, max_steps=options.max_steps)
        judge = self._world.judge
        return Rollout(seed, judge.success, judge.reason or "timeout", result.steps, np.array(said))


class Network:
    """The policy's own model, asked for several pictures at once.

    Args:
        arguments: From :func:`read_words`.
        assignments: Further options, such as ``policy.device:=cuda``.
    """

    def __init__(self, arguments: argparse.Namespace, assignments: Sequence[str] = ()) -> None:
        from vla_ros.config import load
        from vla_ros.policies.openvla import OpenVLAPolicy

        plan = demo.plan(arguments)
        self._policy = OpenVLAPolicy(load(plan.files, (*plan.assignments, *assignments)))
        self._policy.load()
        loaded = self._policy.loaded
        self.meaning = Meaning(self._policy.spec, loaded.bins, loaded.statistics)

    def close(self) -> None:
        """Free the weights."""
        self._policy.close()

    def __call__(self, pictures: Sequence[UInt8Array], instructions: Sequence[str]) -> list[IntArray]:
        """Tokens of each picture with its instruction, int64 [7]; prompts of one length go together."""
        import torch

        loaded = self._policy.loaded
        model = loaded.model
        prompts = [loaded.prompt.encode(words) for words in instructions]
        answers: dict[int, IntArray] = {}
        with torch.inference_mode():
            for length in {len(prompt) for prompt in prompts}:
                rows = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
                images = torch.from_numpy(np.stack([pictures[row] for row in rows])).to(model.device)
                ids = torch.from_numpy(np.stack([prompts[row] for row in rows])).to(model.device)
                patches = model.embed_image(model.normalize(images))
                logits, cache = model.prefill(patches, ids, room=self.meaning.spec.dimension)
                tokens = model.greedy(logits, cache, self.meaning.spec.dimension).tokens.cpu().numpy()
                answers.update(zip(rows, tokens, strict=True))
        return [answers[row] for row in range(len(prompts))]


def roll_out(
    checkpoint: Path,
    words: Sequence[str],
    seeds: Sequence[int],
    processes: int = 0,
    assignments: Sequence[str] = (),
    told: Callable[[Rollout], None] | None = None,
) -> list[Rollout]:
    """Run the episodes of ``seeds``; results in their order.

    Args:
        checkpoint: Folder of the checkpoint.
        words: Arguments of ``vla-ros demo`` (:mod:`~tools.train.controls`).
        seeds: Of the scenes.
        processes: Simulations at a time; 0 takes one per core, 1 runs them in this process.
        assignments: Options of the policy, ``name:=value``.
        told: Hears each result as it comes.

    Raises:
        VlaRosError: The checkpoint does not load, or a simulation ended.
    """
    arguments = read_words(checkpoint, words)
    network = Network(arguments, assignments)
    results: dict[int, Rollout] = {}
    count = min(processes or os.cpu_count() or 1, len(seeds))
    play = _alone if count <= 1 else _together
    try:
        for rollout in play(arguments, network, list(seeds), count):
            results[rollout.seed] = rollout
            if told is not None:
                told(rollout)
    finally:
        network.close()
    return [results[seed] for seed in seeds]


def _alone(arguments: argparse.Namespace, network: Network, seeds: list[int], _: int) -> Iterator[Rollout]:
    simulation = Simulation(arguments, network.meaning)
    try:
        for seed in seeds:
            yield simulation.run(seed, lambda picture, words: network([picture], [words])[0])
    finally:
        simulation.close()


def _together(arguments: argparse.Namespace, network: Network, seeds: list[int], count: int) -> Iterator[Rollout]:
    context = multiprocessing.get_context("spawn")
    lines: list[Connection] = []
    workers = []
    for number in range(count):
        here, there = context.Pipe()
        worker = context.Process(
            target=_simulate, args=(there, arguments, network.meaning, seeds[number::count]), daemon=True
        )
        worker.start()
        there.close()
        lines.append(here)
        workers.append(worker)
    try:
        while lines:
            asked: list[tuple[Connection, Any]] = []
            for line in wait(lines):
                assert isinstance(line, Connection)
                try:
                    message = line.recv()
                except EOFError:
                    raise VlaRosError("a simulation ended early; its message is above") from None
                if isinstance(message, Rollout):
                    yield message
                elif message is None:
                    lines.remove(line)
                else:
                    asked.append((line, message))
            if asked:
                pictures, words = zip(*(message for _, message in asked), strict=True)
                for (line, _), tokens in zip(asked, network(pictures, words), strict=True):
                    line.send(tokens)
    finally:
        for line in lines:
            line.close()
        for worker in workers:
            worker.join(5)
            if worker.is_alive():
                worker.terminate()


def _simulate(line: Connection, arguments: argparse.Namespace, meaning: Meaning, seeds: Sequence[int]) -> None:
    """Body of a simulation's process: questions and results out, tokens in; None at the end."""
    simulation = Simulation(arguments, meaning)

    def ask(picture: UInt8Array, words: str) -> IntArray:
        line.send((picture, words))
        tokens: IntArray = line.recv()
        return tokens

    try:
        for seed in seeds:
            line.send(simulation.run(seed, ask))
        line.send(None)
    finally:
        simulation.close()
