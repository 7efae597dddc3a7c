"""SnapFlow: distils the flow of any family into a few steps, from its own shortcuts.

A part of a batch trains as before. The others learn a whole step at once: from noise, or from where a step before
would end, to where the step ends, with the mean velocity of two half steps as the target. The network learns from a
new condition, the time at which a step ends, whether a step is short or whole; its last layer starts at zero, so
the network starts as its teacher. Sources: arXiv 2604.05656; physical-ai-studio 015798e (``SnapFlowModelMixin``),
which trains one step; several are this package's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vla_ros.errors import ConfigError
from vla_ros.types import FloatArray, Observation
from vla_ros_models.checkpoint_files import StoredTensor
from vla_ros_models.training import (
    Augment,
    Batch,
    BatchLoss,
    Prepared,
    SampleInputs,
    Trainable,
    as_it_is,
    flow_time,
    masked_mean,
    stack_arrays,
)

STEPS = (1, 2, 4)
"""Numbers of flow steps into which a flow can be distilled."""

ALPHA, LAMBDA = 0.5, 0.1
"""Share of a batch that trains as before, and the weight of the others."""

TRAINED: Mapping[str, str] = {
    "pi0": r"paligemma_with_expert\.gemma_expert\.|(state|action_in|action_out)_proj|(action_|target_)?time_mlp",
    "smolvla": r"vlm_with_expert\.lm_expert\.|(state|action_in|action_out)_proj|(action_|target_)?time_mlp",
    "groot": r"action_head\.(?!vlln|vl_self_attention)",
}
TRAINED = TRAINED | {"pi05": TRAINED["pi0"]}
"""Pattern of the parameters that train, by family: the action expert and its projections. What reads images and
language is the teacher's."""


class FlowTrainee(Protocol):
    """What a family's trainee offers to its distillation."""

    def read(self, batch: Any) -> Batch:
        """Return what the flow attends to, which no flow time changes."""

    def predict(
        self,
        batch: Any,
        context: Any,
        noisy: Tensor,
        left: Tensor,
        target: Tensor | None = None,
        given: Tensor | None = None,
    ) -> Tensor:
        """Return the velocity from actions to noise, float32 [B, H, A], of ``noisy`` actions at ``left`` [B].

        ``left`` is 1 for noise and 0 for actions. ``target`` [B] is where the step ends, alike. ``given``, bool
        [B, H], are actions that are given, at time 0: trained real-time chunking.
        """

    def counted(self, batch: Any) -> Tensor:
        """Return what counts in the loss, bool [B, H, A]."""

    def add_targets(self) -> Mapping[str, nn.Parameter]:
        """Add the layers that embed ``target``; return their parameters by their names in a checkpoint."""


@dataclass(frozen=True, eq=False)
class ShortcutBatch(Batch):
    """B observations with K flows each; the first ``matching`` of all N = K * B flows train as before."""

    inner: Any  # the family's batch; its noise and times are not used
    matching: int
    noise: Tensor  # float32 [N, H, A], the first of every observation, then the second of every one
    left: Tensor  # float32 [N], flow time of the first ones; where the step of the others begins
    given: Tensor  # bool [N, H], actions that are given

    @property
    def images(self) -> Tensor:
        """Images [B, cameras, H, W, 3]."""
        found: Tensor = self.inner.images
        return found

    @property
    def tokens(self) -> Tensor:
        """The prompt's tokens [B, L]."""
        found: Tensor = self.inner.tokens
        return found


class SnapFlow(nn.Module):
    """Maps a :class:`ShortcutBatch` to its loss. ``delay`` is the most actions that are given."""

    def __init__(self, trainee: Any, steps: int, delay: int = 0) -> None:
        super().__init__()
        self.trainee, self.steps, self.delay = trainee, steps, delay

    @property
    def network(self) -> Any:
        """The trainee's network."""
        return self.trainee.network

    def forward(self, batch: ShortcutBatch) -> BatchLoss:
        """Return the loss of a batch."""
        count, left, trainee, given = batch.matching, batch.left, self.trainee, batch.given if self.delay else None
        times = len(left) // len(batch.inner.actions)

        def tile(one: Tensor) -> Tensor:
            return one.repeat(times, *(1,) * (one.ndim - 1))

        context = trainee.read(batch.inner).each(tile)  # what reads images and language runs once
        inner = replace(batch.inner, images=batch.inner.images[:0]).each(tile)
        inner = replace(inner, noise=batch.noise)
        whole = torch.arange(len(left), device=left.device) >= count
        end = torch.where(whole, left - 1 / self.steps, left)
        share = left[:, None, None]
        noisy = _hold(share * inner.noise + (1 - share) * inner.actions, inner, given)
        wanted = inner.noise - inner.actions
        if count < len(left):
            late, rest = noisy[count:], inner.after(count)
            arguments = rest, context.after(count)
            kept = None if given is None else given[count:]
            begin, half = left[count:], left[count:] - 0.5 / self.steps
            with torch.no_grad():
                first = trainee.predict(*arguments, late, begin, begin, kept)
                between = _hold(late - first * (0.5 / self.steps), rest, kept)
                second = trainee.predict(*arguments, between, half, half, kept)
            wanted = torch.cat([wanted[:count], (first + second) / 2])
        error = (trainee.predict(inner, context, noisy, left, end, given) - wanted).square()
        error = error * torch.where(whole, LAMBDA, 1.0)[:, None, None]
        counts = trainee.counted(inner)
        # A shortcut has no target in the data, so nothing of it is after an episode's end.
        counts = torch.where(whole[:, None, None], counts.any(dim=1, keepdim=True), counts)
        if given is not None:
            counts = counts & ~given[..., None]
        return BatchLoss(masked_mean(error, counts), error)


def _hold(noisy: Tensor, batch: Any, given: Tensor | None) -> Tensor:
    return noisy if given is None else torch.where(given[..., None], batch.actions, noisy)


@dataclass(frozen=True, eq=False)
class ShortcutInputs:
    """Prepares a family's samples for :class:`SnapFlow`."""

    inputs: SampleInputs
    steps: int
    delay: int  # as for :class:`SnapFlow`
    flows: int  # K, of each observation

    def prepare(
        self,
        observation: Observation,
        actions: FloatArray,
        is_pad: NDArray[np.bool_],
        random: np.random.Generator,
        augment: Augment = as_it_is,
    ) -> Prepared:
        """See :class:`~vla_ros_models.training.SampleInputs`; half of the flows have given actions."""
        found, flows = self.inputs.prepare(observation, actions, is_pad, random, augment), self.flows
        shape = found["actions"].shape
        delay = random.integers(self.delay + 1, size=flows) * (random.random(flows) < 0.5)
        return {
            **found,
            "noises": random.standard_normal((flows, *shape), np.float32),
            "time": np.array([flow_time(random) for _ in range(flows)]),
            "begin": (1 - random.integers(self.steps, size=flows) / self.steps).astype(np.float32),
            "given": np.arange(shape[0]) < delay[:, None],
            "draw": np.asarray(random.random()),
        }

    def collate(self, samples: Sequence[Prepared]) -> ShortcutBatch:
        """See :class:`~vla_ros_models.training.SampleInputs`.

        On average, :data:`ALPHA` of the flows train as before, in batches of any size.
        """

        def of_all(key: str) -> Tensor:
            return stack_arrays(samples, key).transpose(0, 1).flatten(0, 1)

        matching = int(ALPHA * len(samples) * self.flows + samples[0]["draw"])
        left = torch.cat([of_all("time")[:matching], of_all("begin")[matching:]])
        return ShortcutBatch(self.inputs.collate(samples), matching, of_all("noises"), left, of_all("given"))


def distilled(trainable: Trainable, steps: int, flows: int = 1) -> Trainable:
    """Return a checkpoint that is to be distilled into ``steps`` flow steps, one of :data:`STEPS`.

    ``flows`` of each observation train at a time.
    """
    if trainable.family not in TRAINED:
        raise ConfigError(f"{trainable.family}: has no flow to distil; pi0, pi0.5, SmolVLA and GR00T have one")
    trainee: Any = trainable.trainee
    added: Mapping[str, nn.Parameter] = trainee.add_targets()
    for name, parameter in added.items():
        parameter.requires_grad_(False)
        if "_out." in name:
            nn.init.zeros_(parameter)
    own = {f"trainee.{name}": stored for name, stored in trainable.names.items()}
    wrapped = SnapFlow(trainee, steps, trainable.delay)
    own |= {key: name for key, one in wrapped.named_parameters() for name, new in added.items() if one is new}
    stored = {name: StoredTensor(Path(), tuple(one.shape), "F32", name) for name, one in added.items()}
    return replace(
        trainable,
        trainee=wrapped,
        names=own,
        stored={**trainable.stored, **stored},
        inputs=ShortcutInputs(trainable.inputs, steps, trainable.delay, flows),
    )
