"""Labels of a state: the expert's action for every object and task, and the image patch of each object."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tools.train.chunks import pick_chunks
from vla_ros.types import FloatArray
from vla_ros_lab.sim.expert import Situation, decide, plan
from vla_ros_lab.sim.tasks import COLOURS, SHAPES, SLOTS, make_task

KINDS: tuple[str, ...] = tuple(f"{colour}_{shape}" for colour in COLOURS for shape in SHAPES)
"""Names of all kinds of objects."""

SIDE, PATCH = 224, 14
"""Sides of an image and of a patch in pixels."""

NOWHERE = -1
"""Patch of an object that is not visible; kind of an empty slot."""


def counterfactual_actions(
    pose: FloatArray, fingers: float, objects: Mapping[str, FloatArray], tasks: Sequence[str]
) -> NDArray[np.float32]:
    """Return the expert's action for each task and object in the same state.

    A network that is trained only on the object that the arm approaches learns to follow the arm instead of the
    instruction.

    Args:
        pose: Pose of the tool in the base frame, float64 [4, 4], metres.
        fingers: Opening of one finger, metres.
        objects: Name to centre [3], metres in the base frame, in the order of the scene's slots.
        tasks: Names of the tasks.

    Returns:
        Float32 [tasks, SLOTS, 7]; zeros for empty slots.
    """
    actions = np.zeros((len(tasks), SLOTS, 7), np.float32)
    for row, name in enumerate(tasks):
        for slot, thing in enumerate(objects):
            actions[row, slot] = decide(make_task(name, thing), pose, fingers, objects)
    return actions


def counterfactual_chunks(
    states: FloatArray, places: FloatArray, tasks: Sequence[str], horizon: int, rate_hz: float
) -> NDArray[np.float32]:
    """Return the expert's next H joint positions and gripper values for each task and object in N states.

    Args:
        states: Joint positions, radians, and opening of one finger, metres, float64 [N, 8].
        places: Centre of each slot's object, metres in the base frame, float64 [N, SLOTS, 3]; NaN for empty slots.
        tasks: Names of the tasks.
        horizon: Number of steps, H.
        rate_hz: Steps per second.

    Returns:
        Float32 [N, tasks, SLOTS, H, 8]; zeros for empty slots.
    """
    chunks = np.zeros((len(states), len(tasks), SLOTS, horizon, 8), np.float32)
    rows, slots = np.nonzero(np.isfinite(places[..., 0]))
    for column, name in enumerate(tasks):
        if name == "pick":
            found = pick_chunks(states[rows, :7], states[rows, 7], places[rows, slots], horizon, rate_hz)
        else:
            found = np.stack(
                [
                    plan(
                        make_task(name, ""),
                        Situation(state[:7], state[7], place),
                        "joint_position",
                        horizon,
                        rate_hz,
                    )
                    for state, place in zip(states[rows], places[rows, slots], strict=True)
                ]
            )
        chunks[rows, column, slots] = found
    return chunks


def kinds_of(objects: Sequence[str]) -> NDArray[np.int8]:
    """Return the index in :data:`KINDS` of each slot's object, int8 [SLOTS]; :data:`NOWHERE` for empty slots."""
    kinds = np.full(SLOTS, NOWHERE, np.int8)
    kinds[: len(objects)] = [KINDS.index(name) for name in objects]
    return kinds


def patch_of(pixel: FloatArray, image_size: int = SIDE, patch_size: int = PATCH) -> int:
    """Return the row-major index of the patch with ``pixel`` (row, column); :data:`NOWHERE` outside the image."""
    row, column = (int(np.floor(value / patch_size)) for value in pixel)
    side = image_size // patch_size
    return row * side + column if 0 <= row < side and 0 <= column < side else NOWHERE
