"""Judges real-time chunking by LeRobot's own: the demo's weights on the simulated table, paired by seed.

Runs of `vla-ros demo` in simulated time, live at each delay: `append`, this package's `rtc` and LeRobot's, with the
demo's options (guided by the whole rest of the plan, `ones`). LeRobot 0.6.1 runs in a Python of its own, on a copy
of the checkpoint with what it needs: no field that it does not know, a tokenizer that begins with <bos>, zeros for
weights that no action depends on. Run again, it continues where it stopped.

    python benchmarks/rtc_judge.py LEROBOT_PYTHON --json FILE [--episodes 40] [--delays 0 100 200]
    LEROBOT_PYTHON benchmarks/rtc_judge.py chunks    # chunk by chunk, with the same noise
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))  # this is run as a file

CHUNK, BLOCK = 16, 20  # actions of a chunk of the demo's policy; seeds of one run
GUIDED = {"ones": CHUNK, "linear": 10}
"""The guidance's schedules, each with its horizon: the demo's, and LeRobot's default."""

OPTIONS = (
    "features.state:=['state = arm.joint_position + arm.gripper[0..1 clipped]']",
    "features.action:=['arm.joint_position', 'arm.gripper']",
    "control.rate_hz:=20.0",
    "gripper.threshold:=0.5",
    "timeouts.inference:=60",  # real seconds, on a busy machine; the simulated delay is what counts
)
"""What config/demo_pi.yaml says of the same weights, for every cell."""


CELLS = "append", "rtc", "LeRobot's rtc"


def run(arguments: argparse.Namespace, scratch: Path) -> int:
    """Make the runs that are missing, and print the table."""
    from benchmarks.distilled import compared
    from benchmarks.schedules import CAMERA_HZ, markdown_table
    from tools.train.evaluate import run_demo
    from vla_ros.config.checkpoints import folder_of
    from vla_ros.files import save_text

    known: dict[str, dict[str, bool]] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    first, last, folder = arguments.seed, arguments.seed + arguments.episodes, scratch / "checkpoint"
    write_checkpoint(folder_of("demo-pi"), folder, "ones", CHUNK)
    launcher = f'#!/bin/sh\nexec {arguments.python} {Path(__file__).resolve()} serve {folder} "$@"\n'
    (folder / "python").write_text(launcher)
    (folder / "python").chmod(0o700)
    judge = [f"policy.python:={folder / 'python'}", f"policy.tokenizer:={folder}"]
    for seed, delay, name in product(range(first, last, BLOCK), arguments.delays, CELLS):
        found = known.setdefault(f"{name} {delay:g}", {})
        if str(seed) in found:
            continue
        theirs = name == CELLS[-1]
        words = ["--simulated-time", "--delay-ms", f"{delay:g}", "--camera-hz", str(CAMERA_HZ)]
        words += ["--seed", str(seed), "--episodes", str(min(BLOCK, last - seed))]
        words += ["--schedule", "append" if name == "append" else "rtc"]
        words += ["--policy", "lerobot" if theirs else "pi", "--checkpoint", str(folder) if theirs else "demo-pi"]
        options = [
            *OPTIONS,
            f"policy.seed:={seed}",
            *(judge if theirs else ()),
        ]  # demo_pi.yaml says guided and ones
        result = run_demo(*words, *(word for option in options for word in ("-p", option)))
        found |= {str(one["seed"]): bool(one["success"]) for one in result["episodes"]}
        save_text(arguments.json, json.dumps(known, indent=1) + "\n")
        print(f"{name}, {delay:g} ms, {len(found)} episodes: {sum(found.values())}", flush=True)
    lines: list[tuple[str, ...]] = [("delay", *CELLS, "LeRobot's lost and won against `rtc`", "difference, 95 %")]
    for delay in arguments.delays:
        scores = [known[f"{name} {delay:g}"] for name in CELLS]
        shown = [f"{sum(score.values())} of {len(score)}" for score in scores]
        lines.append((f"{delay:g} ms", *shown, *compared(*scores[1:])))
    print(markdown_table(lines))
    return 0


def write_checkpoint(source: Path, folder: Path, guidance: str, horizon: int) -> None:
    """Copy a checkpoint as LeRobot 0.6.1 reads it, with the options of its RTC."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    path = folder / "config.json"
    content = json.loads(path.read_text())
    del content["rtc_training_max_delay"]
    rtc = {"prefix_attention_schedule": guidance.upper(), "execution_horizon": horizon}
    path.write_text(json.dumps({**content, "n_action_steps": CHUNK, "dtype": "float32", "rtc_config": rtc}))
    names = {f"{one}_token": f"<{one}>" for one in ("pad", "bos", "eos", "unk")}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names})
    )
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())  # LeRobot expects Gemma's, which begins with <bos>
    order = [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    known = {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}}
    begun = {"type": "TemplateProcessing", "single": order, "pair": order, "special_tokens": known}
    path.write_text(json.dumps({**content, "post_processor": begun}))
    weights = load_file(folder / "model.safetensors")
    stem, width = "model.paligemma_with_expert.", weights["model.action_in_proj.bias"].shape[0]
    embedding = weights[f"{stem}paligemma.model.language_model.embed_tokens.weight"]
    weights[f"{stem}paligemma.lm_head.weight"] = embedding.clone()  # tied
    weights[f"{stem}gemma_expert.lm_head.weight"] = embedding.new_zeros(len(embedding), width)
    last = f"{stem}paligemma.model.language_model."
    layers = sorted(name for name in weights if name.startswith(f"{last}layers."))
    number = max(int(name.split("layers.")[1].split(".")[0]) for name in layers)
    for name in (each.replace("layers.0.", f"layers.{number}.") for each in layers if "layers.0." in each):
        weights.setdefault(name, torch.zeros_like(weights[name.replace(f"layers.{number}.", "layers.0.")]))
    weights.setdefault(f"{last}norm.weight", embedding.new_zeros(embedding.shape[1]))  # no action depends on these
    path = folder / "policy_preprocessor.json"
    content = json.loads(path.read_text())
    content["steps"].append({"registry_name": "device_processor", "config": {"device": "cpu"}})
    path.write_text(json.dumps(content))
    save_file(weights, folder / "model.safetensors")


@contextmanager
def small_sizes(folder: Path) -> Iterator[None]:
    """Replace the sizes that LeRobot fixes by those of a checkpoint's tensors."""
    from lerobot.policies.pi05 import modeling_pi05 as module

    from vla_ros_models.pi.checkpoint import read_checkpoint

    sizes = read_checkpoint(folder).architecture

    def gemma(variant: str) -> Any:
        one = sizes.prefix if variant == "gemma_2b" else sizes.expert
        shape = one.layers, one.intermediate_size, one.heads, one.kv_heads, one.head_dim
        return module.GemmaConfig(one.hidden_size, *shape)

    def model(config: Any, real: Any = module.PaliGemmaForConditionalGenerationWithPiGemma) -> Any:
        vision, own = config.vision_config, sizes.vision
        vision.hidden_size, vision.num_hidden_layers = own.width, own.blocks
        vision.intermediate_size, vision.num_attention_heads = own.mlp_width, own.heads
        vision.patch_size, vision.projection_dim = own.patch_size, sizes.prefix.hidden_size
        config.text_config.vocab_size = config.image_token_id = sizes.vocabulary
        return real(config=config)

    def expert(config: Any, real: Any = module.PiGemmaForCausalLM) -> Any:
        config.vocab_size = sizes.vocabulary
        return real(config=config)

    with (
        patch.object(module, "get_gemma_config", gemma),
        patch.object(module, "PaliGemmaForConditionalGenerationWithPiGemma", model),
        patch.object(module, "PiGemmaForCausalLM", expert),
    ):
        yield


def serve(folder: Path, words: list[str]) -> int:
    """Run `vla-ros` in LeRobot's Python."""
    from vla_ros.cli.main import main as command

    with small_sizes(folder):
        return command(words)


def compare_chunks(scratch: Path) -> int:
    """Print how far chunks of the same weights, observation, noise and previous chunk are from LeRobot's."""
    import numpy as np
    import torch

    from vla_ros.config import load
    from vla_ros.config.checkpoints import folder_of
    from vla_ros.policies.base import create
    from vla_ros.types import Observation, PreviousChunk

    draw = np.random.default_rng(0)
    sources = folder_of("demo-pi"), Path(__file__).parents[1] / "checkpoints" / "libero"
    for source, (guidance, horizon) in product(sources, GUIDED.items()):
        folder = scratch / source.name / guidance
        write_checkpoint(source, folder, guidance, horizon)
        judge = ["policy.name:=lerobot", f"policy.checkpoint:={folder}", f"policy.tokenizer:={folder}"]
        own = ["policy.name:=pi", f"policy.checkpoint:={source}", f"policy.rtc_schedule:={guidance}"]
        own += ["policy.rtc:=guided", f"policy.rtc_horizon:={horizon}"]
        ours, theirs = (create(load([], words)) for words in (own, judge))
        with small_sizes(folder):
            for policy in (ours, theirs):
                policy.load()
        network, numbers = theirs._checkpoint.policy.model, ours.spec.dimension
        side = json.loads((folder / "config.json").read_text())["image_resolution"]
        found: dict[str, float] = {}
        for _, delay in product(range(6), (None, 0, 2, 4)):
            images = {key: draw.integers(0, 256, (*side, 3), dtype=np.uint8) for key in ours.spec.image_keys}
            state, noise = 0.3 * draw.normal(size=8), draw.normal(size=(CHUNK, 8)).astype(np.float32)
            left = 0.3 * draw.normal(size=numbers) + 0.02 * draw.normal(size=(CHUNK - 3, numbers)).cumsum(0)
            seen = Observation(
                images, "pick up the red cube", 0, {"state": state}, noise=noise,
                previous=None if delay is None else PreviousChunk(left, delay),
            )  # fmt: skip
            drawn = torch.from_numpy(noise)[None]
            network.sample_noise = lambda *_, drawn=drawn: drawn
            one, other = (policy.infer(policy.start_session(), seen).actions for policy in (ours, theirs))
            name = "no previous chunk" if delay is None else f"delay {delay}"
            found[name] = max(found.get(name, 0.0), float(np.abs(one - other).max()))
        shown = {name: f"{value:.1e}" for name, value in found.items()}
        print(f"{source.name}, {guidance}: largest difference", shown, f"of numbers up to {np.abs(one).max():.2g}")
    return 0


def main() -> int:
    """Run all cells, or the server of one of LeRobot's."""
    if sys.argv[1:2] == ["serve"]:
        return serve(Path(sys.argv[2]), sys.argv[5:])  # behind "-m vla_ros.cli"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", type=Path, help="of an environment with LeRobot 0.6.1 and this package")
    parser.add_argument("--episodes", type=int, default=40, help="of each cell")
    parser.add_argument("--seed", type=int, default=10_000, help="of the first episode")
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 100, 200], help="milliseconds")
    parser.add_argument("--json", type=Path, required=True, help="the figures; kept and continued")
    with tempfile.TemporaryDirectory() as scratch:
        if sys.argv[1:] == ["chunks"]:
            return compare_chunks(Path(scratch))
        return run(parser.parse_args(), Path(scratch))


if __name__ == "__main__":
    sys.exit(main())
