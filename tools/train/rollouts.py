"""Runs many episodes fast: parallel simulations, and one network that infers for all of them in batches.

Everything else is as in the demo: images arrive upside down and are processed by :mod:`vla_ros.vision`, actions go
through the node's controller, and the options are those of ``vla-ros demo``.
"""

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
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import VlaRosError
from vla_ros.policies.openvla.processing import ActionBins, ActionStatistics
from vla_ros.sim.arguments import episode_options, make_table, parse, plan_demo
from vla_ros.sim.table import TableOptions
from vla_ros.types import ActionChunk, IntArray, Observation, UInt8Array
from vla_ros.vision.preprocess import Preprocessor, process

Infer = Callable[[UInt8Array, str], IntArray]
"""Maps a processed image and an instruction to action tokens."""


@dataclass(frozen=True)
class Rollout:
    """One episode."""

    seed: int  # seed of the scene
    success: bool  # True if the named object was moved as instructed
    reason: str  # as in :class:`~vla_ros.sim.results.EpisodeResult`
    steps: int  # control steps
    tokens: IntArray  # int64 [steps, 7], the network's tokens


@dataclass(frozen=True)
class Meaning:
    """Converts tokens to actions: ``bins`` yield normalised values, ``statistics`` metres and radians."""

    spec: PolicySpec
    bins: ActionBins
    statistics: ActionStatistics


def parse_options(checkpoint: Path, options: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of ``vla-ros demo`` with the OpenVLA policy and this checkpoint."""
    statistics = f"policy.unnorm_key:={DATASET}"
    return parse("--policy", "openvla", "--checkpoint", str(checkpoint), "-p", statistics, *options)


class Simulation:
    """Runs episodes without a ROS graph; ``arguments`` come from :func:`parse_options`."""

    def __init__(self, arguments: argparse.Namespace, meaning: Meaning) -> None:
        self._arguments = arguments
        self._meaning = meaning
        config: Config = plan_demo(arguments).config
        self._options = episode_options(arguments, config)
        self._controls = TableOptions(arguments.blank, arguments.shuffle, arguments.switch_at)
        self._preprocessor = Preprocessor(config.camera, meaning.spec)
        self._controller = make_controller(meaning.spec, config)
        self._world = make_table(arguments, config).world

    def close(self) -> None:
        self._world.close()

    def run(self, seed: int, infer: Infer) -> Rollout:
        sent: list[IntArray] = []

        def step(observation: Observation) -> ActionChunk:
            rendered = observation.images["image"]
            image = np.zeros_like(rendered) if self._controls.blank else rendered
            upside_down = self._preprocessor.raw(np.ascontiguousarray(image[::-1, ::-1]))
            tokens = infer(process(upside_down), observation.instruction)
            sent.append(tokens)
            action = self._meaning.statistics.unnormalize(self._meaning.bins.decode(tokens))
            return ActionChunk(actions=action[None], stamp=observation.stamp, tokens=tokens)

        result = run_episode(
            self._world, step, self._controller, seed, options=self._options, controls=self._controls
        )
        return Rollout(seed, result.success, result.reason, result.steps, np.array(sent))


class Network:
    """The policy's model for batches of images; ``assignments`` are further options of the node."""

    def __init__(self, arguments: argparse.Namespace, assignments: Sequence[str] = ()) -> None:
        from vla_ros.config import load
        from vla_ros.policies.openvla.policy import OpenVLAPolicy

        planned = plan_demo(arguments)
        self._policy = OpenVLAPolicy(load(planned.files, (*planned.assignments, *assignments)))
        self._policy.load()
        loaded = self._policy.loaded
        self.meaning = Meaning(self._policy.spec, loaded.bins, loaded.statistics)

    def close(self) -> None:
        self._policy.close()

    def __call__(self, images: Sequence[UInt8Array], instructions: Sequence[str]) -> list[IntArray]:
        """Infer tokens, int64 [7], for each image and instruction; prompts of equal length share a batch."""
        import torch

        loaded = self._policy.loaded
        model = loaded.model
        prompts = [loaded.prompt.encode(instruction) for instruction in instructions]
        results: dict[int, IntArray] = {}
        with torch.inference_mode():
            for length in {len(prompt) for prompt in prompts}:
                rows = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
                pixels = torch.from_numpy(np.stack([images[row] for row in rows])).to(model.device)
                ids = torch.from_numpy(np.stack([prompts[row] for row in rows])).to(model.device)
                patches = model.embed_image(model.normalize(pixels))
                logits, cache = model.prefill(patches, ids, room=self.meaning.spec.dimension)
                tokens = model.greedy(logits, cache, self.meaning.spec.dimension).tokens.cpu().numpy()
                results.update(zip(rows, tokens, strict=True))
        return [results[row] for row in range(len(prompts))]


def roll_out(
    checkpoint: Path,
    options: Sequence[str],
    seeds: Sequence[int],
    processes: int = 0,
    assignments: Sequence[str] = (),
    progress: Callable[[int], None] = lambda done: None,
) -> list[Rollout]:
    """Run the episodes of ``seeds`` and return their results in order.

    Args:
        checkpoint: Folder of the checkpoint.
        options: Options of ``vla-ros demo`` (:mod:`~tools.train.controls`).
        seeds: Seeds of the episodes.
        processes: Number of parallel simulations; 0: one per core; 1: run in this process.
        assignments: Further options of the node, ``name:=value``.
        progress: Called with the number of finished episodes.

    Raises:
        VlaRosError: The checkpoint does not load, or a simulation exited.
    """
    arguments = parse_options(checkpoint, options)
    network = Network(arguments, assignments)
    results: dict[int, Rollout] = {}
    count = min(processes or os.cpu_count() or 1, len(seeds))
    play = _alone if count <= 1 else _together
    try:
        for rollout in play(arguments, network, list(seeds), count):
            results[rollout.seed] = rollout
            progress(len(results))
    finally:
        network.close()
    return [results[seed] for seed in seeds]


def _alone(arguments: argparse.Namespace, network: Network, seeds: list[int], _: int) -> Iterator[Rollout]:
    simulation = Simulation(arguments, network.meaning)
    try:
        for seed in seeds:
            yield simulation.run(seed, lambda image, instruction: network([image], [instruction])[0])
    finally:
        simulation.close()


def _together(arguments: argparse.Namespace, network: Network, seeds: list[int], count: int) -> Iterator[Rollout]:
    context = multiprocessing.get_context("spawn")
    connections: list[Connection] = []
    workers = []
    for number in range(count):
        here, there = context.Pipe()
        worker = context.Process(
            target=_simulate, args=(there, arguments, network.meaning, seeds[number::count]), daemon=True
        )
        worker.start()
        there.close()
        connections.append(here)
        workers.append(worker)
    try:
        while connections:
            requests: list[tuple[Connection, Any]] = []
            for connection in wait(connections):
                assert isinstance(connection, Connection)
                try:
                    message = connection.recv()
                except EOFError:
                    raise VlaRosError("a simulation exited early; its message is above") from None
                if isinstance(message, Rollout):
                    yield message
                elif message is None:
                    connections.remove(connection)
                else:
                    requests.append((connection, message))
            if requests:
                images, instructions = zip(*(message for _, message in requests), strict=True)
                for (connection, _), tokens in zip(requests, network(images, instructions), strict=True):
                    connection.send(tokens)
    finally:
        for connection in connections:
            connection.close()
        for worker in workers:
            worker.join(5)
            if worker.is_alive():
                worker.terminate()


def _simulate(
    connection: Connection, arguments: argparse.Namespace, meaning: Meaning, seeds: Sequence[int]
) -> None:
    """Run a simulation process: send (image, instruction), receive tokens; send each Rollout, and finally None."""
    simulation = Simulation(arguments, meaning)

    def infer(image: UInt8Array, instruction: str) -> IntArray:
        connection.send((image, instruction))
        tokens: IntArray = connection.recv()
        return tokens

    try:
        for seed in seeds:
            connection.send(simulation.run(seed, infer))
        connection.send(None)
    finally:
        simulation.close()
