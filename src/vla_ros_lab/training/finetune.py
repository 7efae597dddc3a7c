"""``vla-ros finetune``: plan, train, export, prove. Its arguments, and what it does after the data were read."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vla_ros.config import Config
from vla_ros.config.loading import flatten
from vla_ros.config.show import number
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import ConfigError
from vla_ros.houses import installed
from vla_ros.policies.base import Policy
from vla_ros_lab.replay.report import write_report
from vla_ros_lab.replay.result import write_json
from vla_ros_lab.training import plan, proof
from vla_ros_lab.training.adapting import ADAPTERS, AdapterOptions, adapt
from vla_ros_lab.training.augmentation import AUGMENTATIONS, openvla, without_crop
from vla_ros_lab.training.export import export
from vla_ros_lab.training.recipes import recipe_of, view_recipe
from vla_ros_lab.training.restated import restate
from vla_ros_lab.training.samples import Samples
from vla_ros_lab.training.stream import SampleStream
from vla_ros_lab.training.teacher import act
from vla_ros_lab.training.trainer import OPTIMIZERS, RunResult, Say, TrainOptions, train
from vla_ros_models import evidence
from vla_ros_models.distillation import TRAINED, distilled
from vla_ros_models.network_policy import NetworkPolicy, Placement, choose_device
from vla_ros_models.training import Trainable
from vla_ros_models.view import VIEW_FILE, VIEWS, base_digest, write_view

logger = logging.getLogger(__name__)

RUN = "run"
"""Folder of a run's states and TensorBoard's events in the output."""

_OUTPUTS = ("json", "scores", "output")
# Of a run that resumes: where files are, whose content counts, and what changes how it is computed at most.
_MAY_CHANGE = "checkpoint data observations config param check device base_dtype no_recompute workers save_every"
_NOT_LEARNED = re.compile(
    r"(node|record|guard|takeover|collision)\."
    r"|policy\.(checkpoint|device|threads|self_test|evidence|engine|drafts)$"
)

_LIBRARIES = ("torch", "accelerate", "peft", "bitsandbytes", "transformers", "vla_ros")


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says how a checkpoint is fine-tuned; 0 and empty take the family's published recipe."""
    add = parser.add_argument
    add(
        "--adapter",
        default="lora",
        choices=ADAPTERS,
        help="what trains; qlora: on a base in 4 bits; view, "
        "view-lora: for a camera that was moved, writes only view.safetensors",
    )
    add("--steps", type=number(int, 0), default=0, help="optimiser's steps")
    text = "what trains begins with the checkpoint's weights, or with random ones: only its form counts"
    add("--init", default="checkpoint", choices=("checkpoint", "random"), help=text)
    add("--rank", type=number(int, 0), default=0, help="of adapters")
    add("--alpha", type=number(float, 0), default=0.0, help="of adapters; they are scaled by alpha / rank")
    add("--targets", default="", metavar="PATTERN", help="layers with an adapter, by their names in the checkpoint")
    add("--train", default="", metavar="PATTERN", help="parameters that train in full, likewise")
    add_run_arguments(parser)
    add(
        "--scores", nargs=2, type=Path, metavar=("OLD.json", "NEW.json"),
        help="results of vla-ros eval of the old and the new checkpoint: the verdict is theirs",
    )  # fmt: skip


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says how a network is trained, whatever of it trains."""
    add = parser.add_argument
    add("--output", type=Path, metavar="DIR", help="folder of the new checkpoint; an interrupted run resumes there")
    add("--batch", type=number(int, 0), default=0, help="samples in memory at a time")
    add("--accumulation", type=number(int, 1), default=1, metavar="N", help="such batches of one step")
    add("--learning-rate", type=number(float, 0), default=0.0, metavar="R", help="peak of the schedule")
    add("--optimizer", default="adamw", choices=OPTIMIZERS, help="adamw8bit keeps its state in 8 bits (CUDA)")
    add("--augment", default="recipe", choices=("recipe", *AUGMENTATIONS), help="how images are changed")
    add("--mask-padding", action="store_true", help="pi: leave the actions after an episode's end out of the loss")
    add("--hold-out", type=number(float, 0), default=0.1, metavar="SHARE", help="of episodes, for the comparison")
    add("--seed", type=number(int, 0), default=0)
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--base-dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="of what does not train")
    add("--no-recompute", action="store_true", help="keep all activations: faster, and takes more memory")
    workers = min(4, len(os.sched_getaffinity(0)))
    add("--workers", type=number(int, 0), default=workers, help="processes that read samples")
    add("--save-every", type=number(int, 1), default=500, metavar="N", help="steps between saved states")


@dataclass(frozen=True)
class FineTuning:
    """What is trained, from the command or from another program."""

    policy: Policy  # of the checkpoint; not loaded
    folder: Path  # the checkpoint
    open_samples: Callable[[PolicySpec], Samples]
    reload: Callable[..., Policy]  # makes the policy of another checkpoint, and of a viewpoint adapter's file
    data: Mapping[str, str]  # SHA-256 of the files of the data
    config: Config  # the node's options
    # The data's statistics: the layout of the family's file, and its content; None keeps the checkpoint's.
    statistics: tuple[str, Mapping[str, Any]] | None = None
    flow_steps: int = 0  # into which the flow is distilled; 0: it is not
    flows: int = 1  # of each observation that is distilled
    own_actions: bool = False  # whether the actions are the checkpoint's own, not the data's


def finetune(job: FineTuning, arguments: argparse.Namespace, say: Say = print) -> dict[str, Any]:
    """Train as ``arguments`` say; returns ``losses``, ``verdict``, ``peak_gb`` and more, as JSON.

    Raises VlaRosError for data, options or a machine that do not fit.
    """
    output: Path = arguments.output
    if not isinstance(job.policy, NetworkPolicy):
        raise ConfigError(f"{type(job.policy).__name__}: not trained here; use lerobot-train")
    if output.resolve() == job.folder.resolve():
        raise ConfigError(f"--output {output}: is the checkpoint itself; name another folder")
    for name, key in (("adapter_config.json", ""), ("config.json", "quantization_config")):
        path = job.folder / name
        if path.is_file() and (not key or key in json.loads(path.read_text(encoding="utf-8"))):
            raise ConfigError(
                f"--checkpoint {job.folder}: is an adapter or quantised ({name}); write it as a checkpoint of its "
                "own first: vla-ros convert"
            )
    if arguments.adapter in VIEWS and job.statistics is not None:
        raise ConfigError(
            f"--adapter {arguments.adapter}: keeps the checkpoint's statistics, which do not fit the data (--check "
            "says why); give --statistics checkpoint to train nevertheless"
        )
    claimed = _claim(output, job, arguments)
    if arguments.scores:
        old, new = arguments.scores
        return _promote(output, job.folder, old, new, say)
    source, policy = job.folder, job.policy
    if job.statistics is not None:
        source = restate(job.folder, output / RUN / "base", *job.statistics)
        restated = job.reload(source)
        assert isinstance(restated, NetworkPolicy), "the checkpoint's policy does not depend on its statistics"
        policy = restated
    rank, local = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
    device = choose_device(arguments.device)
    if device.type == "cuda" and local:  # of several processes, as accelerate or torchrun start them
        device = torch.device("cuda", local)
    qlora = arguments.adapter == "qlora"
    dtype = arguments.base_dtype
    if dtype == "auto":
        whole = arguments.adapter == "full" and not job.flow_steps
        dtype = "bfloat16" if device.type == "cuda" and not whole else "float32"
    own = {"mask_padding": True} if arguments.mask_padding else {}
    where = Placement(torch.device("cpu") if qlora else device, dtype)
    torch.manual_seed(arguments.seed)
    trainable = policy.trainable(where, not arguments.no_recompute, **own)
    if arguments.init == "random":
        _draw(trainable, arguments)
    recipe = recipe_of(trainable.family, trainable.layout)
    if is_view := arguments.adapter in VIEWS:
        recipe = view_recipe(recipe, arguments.adapter)
    chosen = AdapterOptions(arguments.adapter, arguments.rank, arguments.alpha, arguments.targets, arguments.train)
    if job.flow_steps:
        trainable = distilled(trainable, job.flow_steps, job.flows)
        chosen = AdapterOptions("full", train=TRAINED[trainable.family])
    adapted = adapt(trainable, recipe, chosen, str(device))
    samples = job.open_samples(trainable.spec)
    if job.own_actions:
        samples = act(policy, samples, output / RUN / "actions.npy", say)
    seen, held = proof.hold_out(samples.episodes, arguments.hold_out, arguments.seed)
    name = recipe.augmentation if arguments.augment == "recipe" else arguments.augment
    if trainable.spec.points and name != "none":
        raise ConfigError(f"--augment: {name} moves pixels, but not their points; set --augment none")
    seen_samples, augment = samples, AUGMENTATIONS[name]
    whole, areas = without_crop(trainable.spec.images)
    if name == "openvla" and areas and not job.own_actions:
        if any(job.config.camera.crop_area):
            say("note: camera.crop_area is set, so images are cropped as at inference, and not at random")
        else:
            seen_samples = job.open_samples(dataclasses.replace(trainable.spec, images=whole))
            augment = functools.partial(openvla, areas=areas)
    stream = SampleStream(seen_samples, seen, trainable.inputs, arguments.seed, augment)
    options = TrainOptions(
        **{
            one.name: getattr(arguments, one.name)
            for one in dataclasses.fields(TrainOptions)
            if one.name != "log_every"
        }
    )
    batch = options.batch or recipe.batch
    trains = sum(one.numel() for one in adapted.parameters.values())
    what = f"into {job.flow_steps} flow steps" if job.flow_steps else arguments.adapter
    say(f"{trainable.family}: {what} as in {recipe.source}; {trains:,} parameters train")
    first = trainable.inputs.collate([stream[0]])
    planned = plan.plan_step(
        adapted,
        batch,
        options.optimizer,
        _tokens(trainable, first),
        recompute=not arguments.no_recompute,
        images=first.images.shape[1],
    )
    say(plan.require(planned, device))
    say(f"{sum(map(len, seen))} samples of {len(seen)} episodes; {len(held)} episodes are held out")
    done = train(adapted, stream, recipe, options, output / RUN, say)
    if rank:  # the first process does the rest
        return {}
    if is_view:
        write_view(output / VIEW_FILE, arguments.adapter, base_digest(trainable.stored), adapted.view)
        trained = job.reload(job.folder, output / VIEW_FILE)
    else:
        export(adapted, source, output, "bfloat16" if qlora else "", job.flow_steps)
        trained = job.reload(output)
    weights = evidence.weight_hashes(output)  # of what is compared
    compared = _prove(job, trained, output, samples, held)
    say(str(compared))
    _write_evidence(output, job, claimed, weights, done, compared)
    return {
        "losses": done.losses,
        "verdict": compared.verdict,
        "proof": proof.as_json(compared),
        "peak_gb": done.peak_gb,
        "planned_gb": planned.total / 1e9,
        "samples_per_second": done.samples_per_second,
        "trained_parameters": trains,
        "family": trainable.family,
        "recipe": recipe.source,
        "output": str(output),
    }


def _draw(trainable: Trainable, arguments: argparse.Namespace) -> None:
    """Replace a checkpoint's weights by random ones."""
    if trainable.initialize is None or arguments.adapter != "full":
        found = f"{trainable.family} with --adapter {arguments.adapter}"
        raise ConfigError(f"--init random: found {found}, expected openvla or pi05 with --adapter full")
    trainable.initialize(arguments.seed)


def _tokens(trainable: Any, batch: Any) -> int:
    """Return how many tokens a sample has, images included."""
    tower = getattr(trainable.trainee.network, "architecture", None)
    patches = getattr(tower, "image_tokens", getattr(tower, "patches", 256))
    return int(batch.images.shape[1] * patches + batch.tokens.shape[1])


def _claim(output: Path, job: FineTuning, arguments: argparse.Namespace) -> dict[str, Any]:
    """Make the output's folder, for this run only; return what identifies the run."""
    options = {name: str(value) for name, value in vars(arguments).items() if name not in _OUTPUTS}
    options["own_actions"] = str(job.own_actions)
    config = {name: value for name, value in flatten(job.config).items() if not _NOT_LEARNED.match(name)}
    described = {
        "checkpoint": str(job.folder.resolve()), "data": dict(job.data), "options": options,
        "config": json.loads(json.dumps(config)),
    }  # fmt: skip
    path = output / RUN / "run.json"
    if int(os.environ.get("RANK", 0)):
        return described
    described["weights"] = evidence.digest_of(job.folder)
    # What was refused before it began has left nothing but that file.
    if [one.name for one in output.rglob("*")] == [RUN, path.name]:
        path.unlink()
        path.parent.rmdir()
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        found = [
            f"--{name.replace('_', '-')}" for name in _changed(before["options"], options, _MAY_CHANGE.split())
        ]
        found += _changed(before.get("config", {}), described["config"])
        found += [name for name in ("weights", "data") if before.get(name, described[name]) != described[name]]
        found += ["checkpoint"] * ("weights" not in before and before["checkpoint"] != described["checkpoint"])
        if found:
            raise ConfigError(
                f"--output {output}: holds another run: {', '.join(found)} differ; name another folder, or give "
                "what this run began with, as run/run.json has it"
            )
    elif output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"--output {output}: is not empty and holds no run; name another folder")
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return described


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], free: Sequence[str] = ()) -> list[str]:
    """Return the names in both whose values differ: a run of an older release has fewer."""
    return [name for name in now if name in before and name not in free and before[name] != now[name]]


def _prove(job: FineTuning, trained: Policy, output: Path, samples: Samples, held: list[range]) -> proof.Proof:
    """Compare the old and the new checkpoint on held-out episodes, as the robot would run them."""
    if not held:
        return proof.Proof(proof.UNDECIDED, "none")
    (output / evidence.FOLDER).mkdir(exist_ok=True)
    found = []
    for name, policy in (("old", job.reload(job.folder)), ("new", trained)):
        policy.load()
        found.append(proof.replay_held_out(policy, samples, held, job.config))
        policy.close()
        write_json(found[-1], output / evidence.FOLDER / f"{name}.json")
    write_report(found[1], output / evidence.FOLDER / "new.html")
    return proof.compare_replays(*found)


def _write_evidence(
    output: Path,
    job: FineTuning,
    claimed: Mapping[str, Any],
    weights: Mapping[str, str],
    done: RunResult,
    compared: proof.Proof,
) -> None:
    found = {name: text for name in _LIBRARIES if (text := installed(name))}
    content = {
        "base": evidence.weight_hashes(job.folder), "weights": weights, "data": dict(job.data),
        "options": claimed["options"], "versions": found, "command": shlex.join(sys.argv),
        "last_losses": done.losses[-20:], "proof": proof.as_json(compared),
    }  # fmt: skip
    evidence.write_evidence(output, content)


def _promote(output: Path, base: Path, old: Path, new: Path, say: Say) -> dict[str, Any]:
    """Replace the verdict of a finished run by that of scores in closed loop."""
    path = output / evidence.FOLDER / evidence.FILE
    if not path.is_file():
        raise ConfigError(f"--scores: {path} is missing; finish the run first, without --scores")
    content = json.loads(path.read_text(encoding="utf-8"))
    if names := evidence.other_files(output, content["weights"]):
        raise ConfigError(f"--scores: in {output}, {names[:5]} are others than {path} states; train it again")
    compared = proof.compare_scores({old: evidence.digest_of(base), new: evidence.digest_of(output)})
    evidence.write_evidence(output, {**content, "proof": proof.as_json(compared), "scores": [str(old), str(new)]})
    say(str(compared))
    return {"verdict": compared.verdict, "proof": proof.as_json(compared), "losses": [], "peak_gb": 0.0}


def data_files(paths: Sequence[Path]) -> dict[str, str]:
    """Return the SHA-256 of every file of recordings or a data set, by its path."""
    files = [
        one for path in paths for one in ([path] if path.is_file() else sorted(path.rglob("*"))) if one.is_file()
    ]
    return {str(one): evidence.sha256(one) for one in files}
