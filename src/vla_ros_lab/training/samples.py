"""What a policy is trained on: observations as the node makes them, and the actions that followed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vla_ros.contract.spec import PolicySpec
from vla_ros.types import FloatArray, Observation


@dataclass(frozen=True, eq=False)
class Sample:
    """One frame of an episode."""

    observation: Observation  # what the policy sees at this frame
    # Float64 [H, D], the actions from this frame on, un-normalised as in ``ActionChunk.actions``; after the
    # episode's end, the last action repeats.
    actions: FloatArray
    is_pad: NDArray[np.bool_]  # bool [H], True after the episode's end
    episode: int  # position of the episode in ``Samples.episodes``
    frame: int  # position of the frame in its episode


class Samples(Protocol):
    """Random access to the samples of a data set. Picklable, so that workers can read it."""

    @property
    def spec(self) -> PolicySpec:
        """The policy's spec, completed with the options."""

    @property
    def episodes(self) -> Sequence[range]:
        """The samples of each episode."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...
