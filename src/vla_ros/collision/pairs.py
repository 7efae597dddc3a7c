"""Finds pairs of links that are always, or never, near each other, by sampling configurations."""

import numpy as np

from vla_ros.collision.checker import Checker
from vla_ros.collision.world import World, named

_CHUNKS = (100, 400, 1500)  # configurations; further ones are tried while a pair is never, or always, near
_ALWAYS = 0.95  # share of the first ones
_FAR = 0.05  # m; a pair that is never nearer is not checked
_APART = 0.005  # m; a pair that is near everywhere, but never nearer than this, is not checked


def sampled_pairs(world: World, stop: float) -> tuple[dict[tuple[str, str], str], set[tuple[str, str]]]:
    """Return the pairs of links that are not checked, and why; and those that are near everywhere.

    Not checked are those nearer than ``stop`` almost everywhere, those nowhere near, and those that are near
    everywhere and never touch. Obstacles, and what a gripper holds, are always checked.
    """
    tree, rng, checker = world.tree, np.random.default_rng(0), Checker(world)
    low, high = np.maximum(tree.low, -np.pi), np.minimum(tree.high, np.pi)
    samples = [tree.follow(rng.uniform(low, high, (count, len(tree.names)))) for count in _CHUNKS]
    unchecked, near = dict[tuple[str, str], str](), set[tuple[str, str]]()
    for number, (i, j) in enumerate(world.pairs):
        first, second = world.bodies[i], world.bodies[j]
        if any(body.is_scene or body.held_by for body in (first, second)):
            continue
        name = named(first.name, second.name)
        found = checker.distances(number, samples[0], _FAR)
        if np.mean(found < stop) >= _ALWAYS:
            unchecked[name] = "always near"
            continue
        for more in samples[1:]:
            if found.min() <= _FAR < found.max():
                break
            found = np.append(found, checker.distances(number, more, _FAR))
        if found.min() > _FAR:
            unchecked[name] = "never near"
        elif found.max() <= _FAR and found.min() >= _APART:
            unchecked[name] = "never touch"
        elif found.max() <= _FAR:
            near.add(name)
    return unchecked, near
