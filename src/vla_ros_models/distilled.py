"""What only a distilled checkpoint has: its configuration, its layers, and its teacher's tensors."""

from pathlib import Path

from vla_ros.config.checkpoints import DISTILLED
from vla_ros.errors import CheckpointError
from vla_ros_models.checkpoint_files import Fields, StoredTensor, read_header, read_manifest

TEACHER = "teacher.safetensors"
"""File with what the teacher has in place of the tensors that were trained."""

TARGET_LAYERS = ("target_time_mlp_in", "target_time_mlp_out")
"""Layers for the time at which a flow step ends."""


def undistilled(config: Fields) -> tuple[Fields, int]:
    """Return the teacher's configuration and the flow steps of a distilled checkpoint; another as it is, and 0."""
    if config.get("type") != DISTILLED:
        return config, 0
    teacher, steps = config.object("teacher"), config.whole("flow_steps", None)
    config.finish()
    return teacher, steps


def teachers_tensors(folder: Path) -> dict[str, StoredTensor]:
    """List the tensors of the checkpoint that was distilled into ``folder``, which are its own to the bit.

    Raises CheckpointError if the folder has lost them.
    """
    if not (folder / TEACHER).is_file():
        raise CheckpointError(
            f"{folder / TEACHER}: no such file, so the weights before the distillation are not there; copy the "
            "whole folder, or use the checkpoint that was distilled"
        )
    kept = {
        name: one
        for name, one in read_manifest(folder).items()
        if not any(layer in name for layer in TARGET_LAYERS)
    }
    return {**kept, **read_header(folder / TEACHER)}
