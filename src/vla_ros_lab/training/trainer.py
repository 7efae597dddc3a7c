"""The training loop on accelerate: accumulation, bf16, several processes, progress, and resuming."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from vla_ros.errors import ConfigError, VlaRosError
from vla_ros_lab.training import state
from vla_ros_lab.training.recipes import Recipe

logger = logging.getLogger(__name__)

OPTIMIZERS = ("adamw", "adamw8bit")


@dataclass(frozen=True)
class TrainOptions:
    """How a network trains; 0 takes the recipe's value."""

    steps: int = 0
    batch: int = 0  # samples in memory at a time, in each process
    accumulation: int = 1  # such batches of one step
    learning_rate: float = 0.0
    seed: int = 0
    optimizer: str = "adamw"  # one of :data:`OPTIMIZERS`
    workers: int = 4
    save_every: int = 500  # steps between saved states; 0: none is saved
    log_every: float = 5.0  # seconds between lines of progress


@dataclass
class RunResult:
    """What a run has done."""

    losses: list[float] = field(default_factory=list)  # of every step, the first at the start
    seconds: list[float] = field(default_factory=list)  # when each step of this process ended, after its start
    samples_per_second: float = 0.0
    peak_gb: float = 0.0  # of the GPU's allocator; 0 on a CPU


Say = Callable[[str], None]


class Trained(Protocol):
    """A network of which some parameters train, as :class:`~vla_ros_lab.training.adapting.Adapted`."""

    @property
    def trainee(self) -> torch.nn.Module:
        """Maps a batch to its :class:`~vla_ros_models.training.BatchLoss`."""

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """All parameters that train, by name."""

    @property
    def learning_rate(self) -> float:
        """Peak of the schedule for what trains; 0: the recipe's."""


class Source(Protocol):
    """Where batches come from, as :class:`~vla_ros_lab.training.stream.SampleStream`."""

    def batches(
        self,
        start: int,
        steps: int,
        batch: int,
        accumulation: int,
        process: tuple[int, int],
        workers: int,
        pin: bool,
    ) -> Iterator[Any]:
        """Yield the batches of the steps from ``start``, which depend on nothing before."""


def make_optimizer(adapted: Trained, recipe: Recipe, options: TrainOptions) -> torch.optim.Optimizer:
    """Return AdamW with the recipe's numbers."""
    named = adapted.parameters
    rate = options.learning_rate or adapted.learning_rate or recipe.learning_rate
    numbers: dict[str, Any] = {"lr": rate, "betas": recipe.betas, "eps": 1e-8}
    decays = {name: recipe.weight_decay * recipe.decays(name, one) for name, one in named.items()}
    groups = [
        {"params": [named[name] for name, own in decays.items() if own == decay], "weight_decay": decay}
        for decay in sorted(set(decays.values()), reverse=True)
    ]
    cuda = next(iter(named.values())).is_cuda
    if options.optimizer == "adamw":
        return torch.optim.AdamW(groups, **numbers, fused=cuda)
    if not cuda:
        raise ConfigError("--optimizer adamw8bit needs a CUDA device; use adamw")
    from bitsandbytes.optim import AdamW8bit

    found: torch.optim.Optimizer = AdamW8bit(groups, **numbers)
    return found


def train(
    adapted: Trained,
    stream: Source,
    recipe: Recipe,
    options: TrainOptions,
    folder: Path,
    say: Say = logger.info,
    at_state: Callable[[int], None] = lambda step: None,
) -> RunResult:
    """Train, with states and TensorBoard's events in ``folder``; resumes from the newest state there.

    ``at_state`` is called with the step of each saved state. Raises VlaRosError if the loss is not finite or a
    state cannot be written; Ctrl+C saves a state first.
    """
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, parse_flag_from_env

    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):  # each would train other tensors than are saved and exported
        if parse_flag_from_env(f"ACCELERATE_USE_{name}"):
            raise ConfigError(
                f"ACCELERATE_USE_{name}: is set, but every process trains the whole network here; unset it, and "
                "choose distributed_type MULTI_GPU in accelerate's configuration"
            )
    device = next(iter(adapted.parameters.values())).device
    halves = any(one.dtype == torch.bfloat16 for one in adapted.trainee.parameters())
    accelerator = Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="bf16" if device.type == "cuda" or halves else "no",
        gradient_accumulation_steps=options.accumulation,
        log_with="tensorboard",
        project_dir=str(folder),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        step_scheduler_with_optimizer=False,
    )
    steps, batch = options.steps or recipe.steps, options.batch or recipe.batch
    parameters = adapted.parameters
    optimizer = make_optimizer(adapted, recipe, options)
    begun, rest = state.restore_state(folder, parameters, optimizer)
    done = RunResult(losses=list(rest or ()))
    if begun:
        say(f"resumes after step {begun} of {steps}")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: recipe.schedule(begun + step, steps))
    trainee, optimizer = accelerator.prepare(adapted.trainee.train(), optimizer)
    if accelerator.is_main_process:
        accelerator.init_trackers("events")
    # Nothing in the loop draws from these, but a layer of a later torch might.
    random.seed(options.seed)
    np.random.seed(options.seed)
    torch.manual_seed(options.seed)
    process = (accelerator.process_index, accelerator.num_processes)
    source = stream.batches(
        begun, steps, batch, options.accumulation, process, options.workers, device.type == "cuda"
    )
    started, told = time.monotonic(), time.monotonic()
    step, summed = begun, torch.zeros((), device=device)
    count = batch * options.accumulation * accelerator.num_processes
    try:
        for found in source:
            with accelerator.accumulate(trainee):
                loss = trainee(found.to(device)).total
                accelerator.backward(loss)
                summed = summed + loss.detach() / options.accumulation
                if not accelerator.sync_gradients:
                    continue
                if recipe.clip:
                    accelerator.clip_grad_norm_(list(parameters.values()), recipe.clip)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            step += 1
            done.losses.append(float(accelerator.reduce(summed, "mean")))
            summed = torch.zeros((), device=device)
            _require_finite(done.losses, step)
            accelerator.log({"loss": done.losses[-1], "learning_rate": schedule.get_last_lr()[0]}, step=step)
            now = time.monotonic()
            done.seconds.append(now - started)
            done.samples_per_second = count * (step - begun) / max(1e-9, now - started)
            if accelerator.is_main_process and (now - told > options.log_every or step == steps):
                told = now
                left = (steps - step) * count / done.samples_per_second
                say(_line(step, steps, done, left))
            if accelerator.is_main_process and _is_due(step, steps, options.save_every):
                state.save(folder, step, parameters, optimizer, done.losses)
                at_state(step)
        accelerator.wait_for_everyone()
    except KeyboardInterrupt:
        if accelerator.is_main_process and step > begun:
            state.save(folder, step, parameters, optimizer, done.losses)
        raise VlaRosError(f"stopped after step {step} of {steps}; the same command resumes there") from None
    finally:
        # Gloo waits for the other process if what uses the group is destroyed after it.
        del trainee
        accelerator.free_memory()
        accelerator.end_training()
    if device.type == "cuda":
        done.peak_gb = torch.cuda.max_memory_allocated(device) / 1e9
    return done


def _is_due(step: int, steps: int, every: int) -> bool:
    return every > 0 and (step % every == 0 or step == steps)


def _require_finite(losses: Sequence[float], step: int) -> None:
    if not math.isfinite(losses[-1]):
        raise VlaRosError(
            f"step {step}: the loss is {losses[-1]}; look for NaN in the data (--check), or lower --learning-rate. "
            "The state before stays"
        )


def _line(step: int, steps: int, done: RunResult, left: float) -> str:
    recent = done.losses[-20:]
    hours, seconds = divmod(round(left), 3600)
    return (
        f"step {step}/{steps}  loss {sum(recent) / len(recent):.4g}  {done.samples_per_second:.1f} samples/s  "
        f"{hours}:{seconds // 60:02d}:{seconds % 60:02d} left"
    )
