"""Everything that determines a trained checkpoint: equal recipes give equal demonstrations and training steps."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from vla_ros.errors import ConfigError

TRAINING_SEED = 10_000_000
"""First seed of demonstrations; demos and evaluations use much smaller seeds."""

HELD_OUT_EVERY = 50
"""Every 50th episode is held out from training."""


DATASET = "table_10hz"
"""Key of the demo's statistics in ``norm_stats``."""

FOREIGN_DATASET = "fractal20220817_data"
"""Key of another robot's statistics in ``norm_stats``, to show the effect of a wrong key."""


def option(default: Any, about: str) -> Any:
    """Return a field of a recipe with its default and the help text of its command-line option."""
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True)
class DataRecipe:
    """How demonstrations are recorded."""

    episodes: int = option(8000, "number of episodes; their seeds are seed and the following ones")
    seed: int = option(TRAINING_SEED, "first seed")
    tasks: tuple[str, ...] = option(("pick",), "tasks that are drawn and labelled")
    max_steps: int = option(60, "steps after which an episode ends")
    noise_m: tuple[float, ...] = option(
        (0.0, 0.003, 0.006, 0.009), "standard deviations of the disturbance, metres; each episode draws one"
    )
    burst_chance: float = option(0.03, "probability per step of a push over a few steps")
    flip_chance: float = option(0.02, "probability per step that the gripper does the opposite for a few steps")
    switch_share: float = option(0.2, "share of episodes in which the instruction switches to another object")
    shard_episodes: int = option(20, "episodes in one file")
    every: int = option(1, "steps between recorded frames of an episode")
    rate_hz: float = option(10.0, "control steps a second; the disturbance is per step")
    objects: int = option(0, "objects on the table; 0: three or four")
    side: int = option(224, "width and height of an image in pixels; others than 224 for flow matching only")
    shrink: float = option(0.0, "metres by which the region of the objects is smaller on each side")
    points: bool = option(False, "record where the surface in each patch is, for a network with geometric tokens")
    horizon: int = option(
        1, "steps of a label: 1 for one end-effector delta, more for a chunk of joint positions and gripper"
    )


@dataclass(frozen=True)
class NetworkRecipe:
    """Sizes of the network."""

    vision_width: int = option(192, "features per patch in each tower")
    vision_blocks: int = option(6, "blocks that run in each tower")
    vision_heads: int = option(3, "attention heads of the towers")
    llm_width: int = option(256, "features per token of the decoder")
    llm_layers: int = option(6, "layers of the decoder")
    llm_heads: int = option(4, "attention heads of the decoder")
    llm_hidden: int = option(512, "hidden features of the decoder's gated MLP")


@dataclass(frozen=True)
class FlowNetworkRecipe:
    """Sizes of the flow-matching network, and the delays it is trained for."""

    vision_width: int = option(192, "features per patch")
    vision_blocks: int = option(5, "blocks of the tower")
    vision_heads: int = option(3, "attention heads of the tower")
    prefix_width: int = option(256, "features per token of the prefix")
    prefix_hidden: int = option(512, "hidden features of the prefix's gated MLP")
    expert_width: int = option(128, "features per token of the action expert")
    expert_hidden: int = option(256, "hidden features of the action expert's gated MLP")
    depth: int = option(5, "layers of prefix and action expert")
    heads: int = option(4, "query heads of prefix and action expert; both have one head of keys and values")
    head_dim: int = option(64, "features per head")
    geometry: bool = option(False, "geometric tokens, of demonstrations with points")
    max_delay: int = option(8, "actions at the beginning of a chunk that may be given (trained real-time chunking)")


@dataclass(frozen=True)
class LabelRecipe:
    """How actions become labels."""

    closed_value: float = option(
        0.7, "gripper value of a closing hand (1 opens). docs/demo-policy.md says why it is not 0"
    )


@dataclass(frozen=True)
class FitRecipe:
    """How the network is trained."""

    steps: int = option(6000, "maximum number of optimiser steps")
    samples: int = option(4, "noises and times per prompt, which share the encoded image (flow matching only)")
    batch: int = option(256, "frames of one micro-batch")
    prompts: int = option(2, "instructions per frame: the one followed and others (counterfactual labels)")
    accumulate: int = option(1, "micro-batches per step")
    learning_rate: float = option(7e-4, "highest rate")
    warmup: int = option(200, "steps of linear warm-up")
    final_share: float = option(0.02, "share of the rate at the end of the cosine")
    weight_decay: float = option(0.05, "AdamW's, on matrices only")
    clip: float = option(1.0, "largest norm of the gradient")
    seed: int = option(0, "seed of the initial weights and of the order of frames")
    shift: int = option(0, "patches by which images are shifted at most, with their points (flow matching only)")
    seam_noise: float = option(
        0.0,
        "normalised deviation of given actions from the expert's; the actions after them return within a few "
        "steps (flow matching only)",
    )
    rotation_weight: float = option(0.5, "weight of the three rotation tokens, which vary little")
    location_weight: float = option(0.5, "weight of the auxiliary loss on the named object's patch")
    kind_weight: float = option(0.5, "weight of the auxiliary loss on the object in each patch")
    background_weight: float = option(0.02, "weight of the class 'none' in that loss")


@dataclass(frozen=True)
class FitOptions:
    """Options that do not change what is learned."""

    device: str = option("auto", "torch device, or auto for CUDA if available")
    compile: bool = option(False, "compile the training step")
    save_every: int = option(500, "steps between saved states, with which figures on held-out frames are logged")


Recipe = TypeVar("Recipe", DataRecipe, NetworkRecipe, FlowNetworkRecipe, LabelRecipe, FitRecipe)


def as_json(recipe: DataRecipe | NetworkRecipe | FlowNetworkRecipe | LabelRecipe | FitRecipe) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(recipe).items()}


def from_json(kind: type[Recipe], values: dict[str, Any]) -> Recipe:
    """Return the recipe from the values of :func:`as_json`.

    Raises:
        ConfigError: An entry is unknown or missing.
    """
    names = {field.name for field in fields(kind)}
    if set(values) != names:
        raise ConfigError(f"{kind.__name__}: found {sorted(values)}, expected {sorted(names)}")
    fitting: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return kind(**fitting)


def claim(path: Path, values: dict[str, Any]) -> None:
    """Write ``values`` to ``path``, or check that it already holds them.

    Raises:
        ConfigError: The file holds another recipe; the text names the first difference.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    if found != values:
        name = next(key for key in {**found, **values} if found.get(key) != values.get(key))
        raise ConfigError(
            f"{path}: found {name}={found.get(name)!r}, expected {values.get(name)!r}; "
            "resume with the same options, or use another folder"
        )
