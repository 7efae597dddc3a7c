"""Measures fine-tuning in the published sizes, with random weights and random images: peak memory and samples/s.

python -m benchmarks.finetune                     every case, each in a process of its own
python -m benchmarks.finetune openvla_qlora_b1    one case
python -m benchmarks.finetune --tiny --device cpu every case in tiny sizes, to try the script

The CUDA allocator is limited to what a case should fit into, so a case that needs more fails. The trainer is that
of ``vla-ros finetune``; only the weights and the samples are random.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.models.subject import OPENVLA_7B, _scaled
from vla_ros.contract.spec import PolicySpec
from vla_ros.types import Observation
from vla_ros_lab.training.adapting import AdapterOptions, adapt
from vla_ros_lab.training.plan import plan_step
from vla_ros_lab.training.recipes import recipe_of
from vla_ros_lab.training.samples import Sample
from vla_ros_lab.training.stream import SampleStream
from vla_ros_lab.training.trainer import TrainOptions, train
from vla_ros_models.checkpoint_files import Fields
from vla_ros_models.openvla.loading import build_empty as build_openvla
from vla_ros_models.openvla.training import NO_LABEL, TokenBatch, TokenTrainee
from vla_ros_models.pi.architecture import PUBLISHED, gemma
from vla_ros_models.pi.loading import PI_TENSORS, parameter_dtype
from vla_ros_models.pi.network import build_empty as build_pi
from vla_ros_models.pi.training import FlowBatch, FlowLossForm, FlowTrainee
from vla_ros_models.smolvla.architecture import SMOLVLM2_CONFIG, read_architecture
from vla_ros_models.smolvla.loading import SMOLVLA_TENSORS
from vla_ros_models.smolvla.network import build_empty as build_smolvla
from vla_ros_models.smolvla.training import SmolVlaTrainee
from vla_ros_models.training import Prepared, Trainable, separate, stack_arrays
from vla_ros_models.weights import fill

WARM_UP, STEPS = 4, 12
PROMPT, ACTIONS = 48, 7


@dataclass(frozen=True)
class Case:
    """One measurement."""

    model: str
    adapter: str
    batch: int
    limit_gb: float  # memory that it should fit into; 0: all
    train: str = ""
    optimizer: str = "adamw"
    recompute: bool = True


CASES = {
    "openvla_qlora_b1": Case("openvla", "qlora", 1, 12, optimizer="adamw8bit"),
    "openvla_qlora_b8": Case("openvla", "qlora", 8, 24),
    "pi05_lora_b4": Case("pi05", "lora", 4, 15),
    "smolvla_expert_b64": Case("smolvla", "full", 64, 12),
    "smolvla_full_b16": Case("smolvla", "full", 16, 12, train="."),
    "openvla_lora_b16": Case("openvla", "lora", 16, 0),
    "pi05_lora_b8": Case("pi05", "lora", 8, 0),
    "pi05_full_b8": Case("pi05", "full", 8, 0),
}


class RandomInputs:
    """Random arrays of a batch's shapes."""

    def __init__(self, kind: Any, make: Callable[[np.random.Generator], Prepared]) -> None:
        self.kind, self.make = kind, make

    def prepare(self, observation: Any, actions: Any, is_pad: Any, random: Any, augment: Any = None) -> Prepared:
        return self.make(random)

    def collate(self, samples: Sequence[Prepared]) -> Any:
        names = [one.name for one in fields(self.kind) if one.name in samples[0]]
        return self.kind(**{name: stack_arrays(samples, name) for name in names})


class NoSamples:
    """Stands for a data set; the inputs are random."""

    episodes = (range(4096),)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Sample:
        return Sample(Observation({}, "", stamp=0), np.zeros((1, ACTIONS)), np.zeros(1, np.bool_), 0, index)


def random_fill(network: nn.Module, device: torch.device, dtype: Any, place: torch.device) -> None:
    """Fill a network on ``place`` with numbers that are drawn on ``device``."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = {name: parameter.shape for name, parameter in network.named_parameters()}

    def produce(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, _scaled(name, torch.randn(shapes[name], generator=generator, device=device)).to(place)

    fill(network, produce, place, dtype)


def make(case: Case, device: torch.device, tiny: bool) -> Trainable:
    """Return a trainable with random weights; QLoRA's is on the host until it is quantised."""
    place = torch.device("cpu") if case.adapter == "qlora" else device
    dtype = torch.float32 if case.adapter == "full" else torch.bfloat16
    return _openvla(case, device, place, dtype, tiny) if case.model == "openvla" else _flow(
        case, device, place, dtype, tiny
    )  # fmt: skip


def _openvla(case: Case, device: torch.device, place: torch.device, dtype: Any, tiny: bool) -> Trainable:
    sizes = OPENVLA_7B
    if tiny:
        towers = tuple(replace(one, width=64, heads=4, mlp_width=128, used_blocks=2) for one in sizes.towers)
        sizes = replace(sizes, towers=towers, llm=replace(
            sizes.llm, hidden_size=64, intermediate_size=128, layers=2, heads=4, kv_heads=4, head_dim=16
        ))  # fmt: skip
    network = build_openvla(sizes)
    random_fill(network, device, dtype, place)

    def sample(random: np.random.Generator) -> Prepared:
        own = np.arange(PROMPT) >= PROMPT - ACTIONS - 1
        tokens = random.integers(3, 31000, PROMPT)
        return {
            "images": random.integers(0, 256, (1, 224, 224, 3), dtype=np.uint8),
            "tokens": tokens,
            "labels": np.where(own, tokens, NO_LABEL),
            "slots": own & (np.arange(PROMPT) < PROMPT - 1),
            "valid": np.ones(PROMPT, np.bool_),
            "actions": random.standard_normal((1, ACTIONS), np.float32),
        }

    names = {f"network.{name}": name for name, _ in network.named_parameters()}
    trainee = TokenTrainee(network, case.recompute)
    return Trainable(trainee, names, {}, RandomInputs(TokenBatch, sample), PolicySpec(()), sizes.llm, "openvla")


def _flow(case: Case, device: torch.device, place: torch.device, dtype: Any, tiny: bool) -> Trainable:
    sizes: Any = PUBLISHED["pi05"]
    cameras, side, prompt = 3, 224, 200
    if case.model == "smolvla":
        config = {"max_state_dim": 32, "max_action_dim": 32, "chunk_size": 50}
        sizes = read_architecture(Fields(config, "config.json"), Fields(dict(SMOLVLM2_CONFIG), "vlm"))
        side, prompt = sizes.vision.image_size, 48
    elif tiny:
        small = gemma(64, 2, 128, heads=4, head_dim=16)
        vision = replace(sizes.vision, width=64, heads=4, mlp_width=128, blocks=2, used_blocks=2)
        sizes = replace(sizes, vision=vision, prefix=small, expert=gemma(32, 2, 64, heads=4, head_dim=16))
    network = build_smolvla(sizes) if case.model == "smolvla" else build_pi(sizes)
    random_fill(network, device, lambda name: parameter_dtype(name, dtype), place)
    tensors = SMOLVLA_TENSORS if case.model == "smolvla" else PI_TENSORS
    names = {f"network.{name}": stored for name, stored in separate(network, tensors.parts(network, ())).items()}
    if case.model == "smolvla":
        network.vision.resize(sizes.vision)
        names.pop("network.vision.pos_embed") if sizes.vision.image_size != sizes.stored_image else None
    kind = SmolVlaTrainee if case.model == "smolvla" else FlowTrainee
    trainee = kind(network, FlowLossForm(ACTIONS), case.recompute)  # type: ignore[arg-type]
    state = getattr(sizes, "state_dim", sizes.action_dim)

    def sample(random: np.random.Generator) -> Prepared:
        shape = sizes.horizon, sizes.action_dim
        return {
            "images": random.integers(0, 256, (cameras, side, side, 3), dtype=np.uint8),
            "seen": np.ones(cameras, np.bool_),
            "tokens": random.integers(3, 40000, prompt),
            "valid": np.arange(prompt) < prompt - 8,
            "state": random.standard_normal(state, np.float32),
            "actions": random.standard_normal(shape, np.float32),
            "is_pad": np.zeros(sizes.horizon, np.bool_),
            "noise": random.standard_normal(shape, np.float32),
            "time": np.float32(random.random()),
        }

    layout = "" if case.model == "smolvla" else "lerobot"
    inputs = RandomInputs(FlowBatch, sample)
    return Trainable(
        trainee, names, {}, inputs, PolicySpec(()), sizes.prefix, case.model, layout, tower=sizes.vision
    )


def measure(name: str, device: torch.device, tiny: bool, limited: bool, workers: int) -> dict[str, Any]:
    """Train a case for a few steps; return its figures."""
    case, began = CASES[name], time.monotonic()
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        if case.limit_gb and limited:
            torch.cuda.set_per_process_memory_fraction(min(1.0, case.limit_gb * 1e9 / total), device)
    trainable = make(case, device, tiny)
    recipe = recipe_of(trainable.family, trainable.layout)
    adapted = adapt(trainable, recipe, AdapterOptions(case.adapter, train=case.train), str(device))
    loaded = time.monotonic() - began
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    stream = SampleStream(NoSamples(), NoSamples.episodes, trainable.inputs, 0)  # type: ignore[arg-type]
    batch = 2 if tiny else case.batch
    sizes, images = trainable.trainee.network.architecture, stream[0]["images"].shape[0]
    tokens = stream[0]["tokens"].size + images * getattr(sizes, "image_tokens", 256)
    planned = plan_step(adapted, batch, case.optimizer, tokens, recompute=case.recompute, images=images)
    options = TrainOptions(
        STEPS + WARM_UP, batch, optimizer="adamw" if device.type == "cpu" else case.optimizer, workers=workers,
        save_every=0, log_every=1e9,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        done = train(adapted, stream, replace(recipe), options, Path(folder), lambda line: None)
    ends = done.seconds
    each = [after - before for before, after in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)]
    reserved = torch.cuda.max_memory_reserved(device) / 1e9 if device.type == "cuda" else 0.0
    return {
        "case": name,
        "batch": batch,
        "trained_parameters": sum(one.numel() for one in adapted.parameters.values()),
        "samples_per_second": batch / statistics.median(each),
        "step_s": statistics.median(each),
        "peak_gb": done.peak_gb,
        "reserved_gb": reserved,
        "planned_gb": planned.total / 1e9,
        "limit_gb": case.limit_gb,
        "load_s": loaded,
        "loss": [done.losses[0], done.losses[-1]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--no-limit", action="store_true", help="do not limit the allocator")
    parser.add_argument("--no-recompute", action="store_true", help="keep all activations")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if len(arguments.cases) == 1:
        device = torch.device(arguments.device)
        name = arguments.cases[0]
        CASES[name] = replace(CASES[name], recompute=not arguments.no_recompute)
        found = measure(name, device, arguments.tiny, not arguments.no_limit, arguments.workers)
        print(json.dumps(found))
        return 0
    results = []
    for name in arguments.cases or CASES:
        options = [name, "--device", arguments.device, "--workers", str(arguments.workers)]
        options += ["--tiny"] * arguments.tiny + ["--no-limit"] * arguments.no_limit
        options += ["--no-recompute"] * arguments.no_recompute
        command = [sys.executable, "-m", "benchmarks.finetune", *options]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
            last = ended.stdout.strip().splitlines()[-1] if ended.stdout.strip() else ""
            result = json.loads(last) if ended.returncode == 0 else {"case": name, "error": ended.stderr[-600:]}
        except subprocess.TimeoutExpired:
            result = {"case": name, "error": "not finished in 150 s"}
        results.append(result)
        print(json.dumps(result), flush=True)
        if arguments.json:
            gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
            arguments.json.write_text(json.dumps({"device": gpu, "torch": torch.__version__, "cases": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
