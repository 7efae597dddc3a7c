"""Tries a published checkpoint: reads it, infers a chunk, and prints a line for docs/.

    python -m tools.published lerobot/smolvla_base                     # downloads it with huggingface_hub
    python -m tools.published --folder DIR -p policy.vlm:=VLM          # one that is here
    python -m tools.published --folder DIR --python ~/lerobot/bin/python -p policy.vlm:=VLM

With ``--python``, the Python of an environment with LeRobot and this package, LeRobot's own code infers the chunk
of the same observation and noise, and the largest difference is printed. It needs LeRobot's layout.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.config import load
from vla_ros.config.loading import assignment
from vla_ros.config.show import add_config_arguments
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import MissingDependencyError, VlaRosError
from vla_ros.policies.base import Policy, create, selection
from vla_ros.types import ActionChunk, Observation

INSTRUCTION = "pick up the red cube"
SIZE = (240, 320)
SEED = 7


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", nargs="?", help="name on the Hugging Face hub")
    parser.add_argument("--folder", type=Path, help="a folder that is here, instead")
    parser.add_argument("--python", default="", help="Python of an environment with LeRobot, to compare with")
    add_config_arguments(parser)
    arguments = parser.parse_args(argv)
    if (arguments.repository is None) == (arguments.folder is None):
        parser.error("expected the name of a repository, or --folder DIR")
    folder = arguments.folder or download(arguments.repository)
    try:
        print(line(str(arguments.repository or folder), str(folder), arguments))
    except VlaRosError as error:
        raise SystemExit(f"{arguments.repository or folder}: refused: {error}") from None


def download(repository: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingDependencyError("huggingface_hub is not installed: pip install huggingface_hub") from None
    return Path(snapshot_download(repository))


def line(title: str, folder: str, arguments: argparse.Namespace) -> str:
    """Return a row for a table: checkpoint, policy, images, state, action, and the difference from LeRobot."""
    config = load(arguments.config, [assignment("policy.checkpoint", folder), *arguments.param])
    print(selection(config), flush=True)
    policy = create(config)
    policy.load()
    noise = draws(policy.spec)
    chunk = infer(policy, noise[-1] if noise else None)
    spec = policy.spec
    policy.close()
    if not np.isfinite(chunk.actions).all():
        raise VlaRosError("the chunk has numbers that are not finite")
    state = ", ".join(f"{one.key} {one.size}" for one in spec.state) or "none"
    compared = "not compared"
    if arguments.python:
        options = ["policy.name:=lerobot", f"policy.seed:={SEED}", "policy.device:=cpu"]
        vlm = getattr(config.policy, "vlm", "") or getattr(config.policy, "tokenizer", "")
        options += [assignment("policy.python", arguments.python), assignment("policy.tokenizer", vlm)]
        published = create(load((), [assignment("policy.checkpoint", folder), *options]))
        try:
            published.load()
            theirs = infer(published, None).actions
        finally:
            published.close()
        compared = f"{np.abs(chunk.actions[:, : theirs.shape[1]] - theirs).max():.1e}"
    images, size = ", ".join(spec.image_keys), f"{chunk.actions.shape[0]} x {chunk.actions.shape[1]}"
    return f"| {title} | `{config.policy.name}` | {images} | {state} | {size} | {compared} |"


def draws(spec: PolicySpec) -> list[Any]:
    """Return the noise that LeRobot draws with :data:`SEED`: at its warm-up, and for the first observation."""
    if not spec.noise:
        return []
    import torch

    torch.manual_seed(SEED)
    return [torch.normal(0.0, 1.0, size=(1, *spec.noise))[0].double().numpy() for _ in range(2)]


def infer(policy: Policy, noise: Any) -> ActionChunk:
    """Infer a chunk from random images and a state in the middle of the training data."""
    spec, random = policy.spec, np.random.default_rng(SEED)
    images = {}
    for image in spec.images:
        picture = random.integers(0, 256, (*(image.takes or SIZE), 3), dtype=np.uint8)
        images[image.key] = image.processor(picture) if image.processor else picture
    state = {one.key: np.array(one.middle or np.zeros(one.size)) for one in spec.state}
    return policy.infer(policy.start_session(), Observation(images, INSTRUCTION, stamp=0, state=state, noise=noise))


if __name__ == "__main__":
    main()
