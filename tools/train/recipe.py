"""Everything that determines a trained checkpoint: equal recipes give equal demonstrations and steps."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from vla_ros.errors import ConfigError

TRAINING_SEED = 10_000_000
"""First seed of demonstrations; demos and evaluations use seeds far below."""

HELD_OUT_EVERY = 50
"""Every 50th episode is held out from training."""


DATASET = "table_10hz"
"""Key of the demo's statistics in ``norm_stats``."""

FOREIGN_DATASET = "fractal20220817_data"
"""Key of another robot's statistics in ``norm_stats``, to show the effect of a wrong key."""


@dataclass(frozen=True)
class DataRecipe:
    """How demonstrations are recorded.

    Attributes:
        episodes: Number of episodes; their seeds are ``seed`` and the following ones.
        seed: First seed.
        tasks: Tasks that are drawn and labelled (:data:`~vla_ros.sim.tasks.TASK_NAMES`).
        max_steps: Steps after which an episode ends.
        noise_m: Standard deviations of the disturbance, metres; each episode draws one.
        burst_chance: Probability per step of a push over a few steps.
        flip_chance: Probability per step that the gripper does the opposite for a few steps.
        switch_share: Share of episodes in which the instruction switches to another object.
        shard_episodes: Episodes in one file.
        every: Steps between recorded frames of an episode.
        rate_hz: Control steps a second; the disturbance is per step.
        horizon: Steps of a label: 1 for one end-effector delta, more for a chunk of joint positions and gripper.
    """

    episodes: int = 8000
    seed: int = TRAINING_SEED
    tasks: tuple[str, ...] = ("pick",)
    max_steps: int = 60
    noise_m: tuple[float, ...] = (0.0, 0.003, 0.006, 0.009)
    burst_chance: float = 0.03
    flip_chance: float = 0.02
    switch_share: float = 0.2
    shard_episodes: int = 20
    every: int = 1
    rate_hz: float = 10.0
    horizon: int = 1


@dataclass(frozen=True)
class NetworkRecipe:
    """Sizes of the network.

    Attributes:
        vision_width: Features per patch in each tower.
        vision_blocks: Blocks that run in each tower.
        vision_heads: Attention heads of the towers.
        llm_width: Features per token of the decoder.
        llm_layers: Its layers.
        llm_heads: Its attention heads.
        llm_hidden: Hidden features of its gated MLP.
    """

    vision_width: int = 192
    vision_blocks: int = 6
    vision_heads: int = 3
    llm_width: int = 256
    llm_layers: int = 6
    llm_heads: int = 4
    llm_hidden: int = 512


@dataclass(frozen=True)
class FlowNetworkRecipe:
    """Sizes of the flow-matching network, and the delays it is trained for.

    Attributes:
        vision_width: Features per patch.
        vision_blocks: Blocks of the tower.
        vision_heads: Its attention heads.
        prefix_width: Features per token of the prefix.
        prefix_hidden: Hidden features of its gated MLP.
        expert_width: Features per token of the action expert.
        expert_hidden: Hidden features of its gated MLP.
        depth: Layers of both.
        heads: Query heads of both; one head of keys and values.
        head_dim: Features per head.
        max_delay: Actions at the beginning of a chunk that may be given (trained real-time chunking).
    """

    vision_width: int = 192
    vision_blocks: int = 5
    vision_heads: int = 3
    prefix_width: int = 256
    prefix_hidden: int = 512
    expert_width: int = 128
    expert_hidden: int = 256
    depth: int = 5
    heads: int = 4
    head_dim: int = 64
    max_delay: int = 8


@dataclass(frozen=True)
class LabelRecipe:
    """How actions become labels.

    Attributes:
        closed_value: Gripper value of a closing hand (1 opens). ``docs/demo-policy.md`` says why it is not 0.
        step_cap: Longest translation of a label, metres; 0 for no limit.
        step_grid: Labels are rounded to multiples of this many metres; 0 for no rounding.
    """

    closed_value: float = 0.7
    step_cap: float = 0.0
    step_grid: float = 0.0


@dataclass(frozen=True)
class FitRecipe:
    """How the network is trained.

    Attributes:
        steps: Optimiser steps, at most.
        span: Seconds over which the rate falls and after which training ends; 0 to go by steps.
        samples: Noises and times per prompt, which share the encoded image (flow matching only).
        batch: Frames of one micro-batch.
        prompts: Instructions per frame: the one followed and others (counterfactual labels).
        accumulate: Micro-batches per step.
        learning_rate: Highest rate.
        warmup: Steps of linear warm-up.
        final_share: Share of the rate at the end of the cosine.
        weight_decay: AdamW's, on matrices only.
        clip: Largest norm of the gradient.
        seed: Seed of the initial weights and of the order of frames.
        seam_noise: Deviation by which the given actions of a chunk miss the expert's (normalised; flow matching
            only). The actions after them return within a few steps.
        rotation_weight: Weight of the three rotation tokens, which hardly vary.
        location_weight: Weight of the auxiliary loss on the named object's patch.
        kind_weight: Weight of the auxiliary loss on the object in each patch.
        background_weight: Weight of the class "none" in it.
    """

    steps: int = 6000
    span: float = 0.0
    samples: int = 4
    batch: int = 256
    prompts: int = 2
    accumulate: int = 1
    learning_rate: float = 7e-4
    warmup: int = 200
    final_share: float = 0.02
    weight_decay: float = 0.05
    clip: float = 1.0
    seed: int = 0
    seam_noise: float = 0.0
    rotation_weight: float = 0.5
    location_weight: float = 0.5
    kind_weight: float = 0.5
    background_weight: float = 0.02


@dataclass(frozen=True)
class FitOptions:
    """Options that do not change what is learned.

    Attributes:
        device: Torch device, or ``auto`` for CUDA if available.
        compile: Compile the training step.
        log_every: Steps between lines of the log.
        save_every: Seconds between saved states.
        time_limit: Seconds after which to save and stop; 0 for no limit.
    """

    device: str = "auto"
    compile: bool = False
    log_every: int = 50
    save_every: float = 60.0
    time_limit: float = 0.0


Recipe = TypeVar("Recipe", DataRecipe, NetworkRecipe, FlowNetworkRecipe, LabelRecipe, FitRecipe)


def as_json(recipe: DataRecipe | NetworkRecipe | FlowNetworkRecipe | LabelRecipe | FitRecipe) -> dict[str, Any]:
    """Return the recipe as plain JSON values."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(recipe).items()}


def from_json(kind: type[Recipe], values: dict[str, Any]) -> Recipe:
    """Return the inverse of :func:`as_json`.

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
