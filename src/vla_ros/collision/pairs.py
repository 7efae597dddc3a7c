"""Finds pairs of links that always or never come near each other, by sampling configurations."""

from collections.abc import Mapping

import numpy as np

from vla_ros.collision.checker import Checker
from vla_ros.collision.world import World

_CHUNKS = (100, 400, 1500)  # configurations; further ones are tried while a pair is never near
_ALWAYS = 0.95  # share of the first ones
_FAR = 0.05  # m; a pair that is never nearer is not checked


def sampled_pairs(world: World, stop: float) -> Mapping[tuple[str, str], str]:
    """Return the pairs of links that are nearer than ``stop`` almost everywhere, or nowhere near, and which.

    Obstacles, and what a gripper holds, are always checked.
    """
    tree, rng, checker = world.tree, np.random.default_rng(0), Checker(world)
    low, high = np.maximum(tree.low, -np.pi), np.minimum(tree.high, np.pi)
    samples = [tree.follow(rng.uniform(low, high, (count, len(tree.names)))) for count in _CHUNKS]
    found = dict[tuple[str, str], str]()
    for number, (i, j) in enumerate(world.pairs):
        first, second = world.bodies[i], world.bodies[j]
        if any(body.is_scene or body.held_by for body in (first, second)):
            continue
        name = (first.name, second.name) if first.name < second.name else (second.name, first.name)
        near = checker.distances(number, samples[0], _FAR)
        if np.mean(near < stop) >= _ALWAYS:
            found[name] = "always near"
        elif near.min() > _FAR and all(checker.distances(number, q, _FAR).min() > _FAR for q in samples[1:]):
            found[name] = "never near"
    return found
