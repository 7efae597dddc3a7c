"""Samples actions from noise: Euler steps along the velocities that the network predicts.

The loop never synchronises with the device and never branches on a value. Shapes, times and constants are fixed
beforehand, so prefix and steps can be captured as one CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vla_ros.policies.pi.gemma import Modulation
from vla_ros.policies.pi.network import PiNetwork, PrefixInput, StepConstants
from vla_ros.policies.pi.rtc import guidance_scale


class Guidance(NamedTuple):
    """Guided real-time chunking; weights of zero leave the chunk as it is.

    Attributes:
        previous: Float32 [B, H, action_dim], normalised, zeros where nothing is left.
        weights: Float32 [B, H, 1], from :func:`~vla_ros.policies.pi.rtc.prefix_weights`.
        limit: Largest factor of the correction.
    """

    previous: Tensor
    weights: Tensor
    limit: float = 10.0


class Inpainting(NamedTuple):
    """Trained real-time chunking: the first actions are given.

    Attributes:
        previous: Float32 [B, H, action_dim], normalised.
        given: Bool [B, H, 1], True for the actions that are given.
    """

    previous: Tensor
    given: Tensor


@dataclass(frozen=True, eq=False)
class Flow:
    """The steps of one integration.

    Attributes:
        steps: Constants of each step, from t = 1 on.
        finished: The same for t = 0, the time of given actions; pi0.5 only.
    """

    steps: tuple[StepConstants, ...]
    finished: StepConstants | None


def euler_times(steps: int, summed: bool) -> list[float]:
    """Compute the times of the steps as float32 values: 1.0, 0.9, ... for ten.

    Args:
        steps: How many.
        summed: True accumulates the step in float32, as openpi does; False multiplies, as LeRobot does. The
            difference moves the actions by up to 1e-4, as the time embedding has fast sines.
    """
    delta = np.float32(-1.0 / steps)
    times = [np.float32(1.0)]
    while len(times) < steps:
        times.append(times[-1] + delta if summed else np.float32(1.0 - len(times) / steps))
    return [float(time) for time in times]


@torch.no_grad()
def make_flow(network: PiNetwork, steps: int = 10, summed: bool = True) -> Flow:
    """Precompute what depends on the time: embeddings, time MLPs and all modulations.

    Args:
        network: Loaded.
        steps: Euler steps.
        summed: As for :func:`euler_times`.
    """
    finished = None if network.architecture.has_state_token else network.constants(0.0)
    return Flow(tuple(network.constants(time) for time in euler_times(steps, summed)), finished)


@torch.no_grad()
def sample_actions(
    network: PiNetwork,
    flow: Flow,
    inputs: PrefixInput,
    noise: Tensor,
    rtc: Guidance | Inpainting | None = None,
) -> Tensor:
    """Sample one chunk per robot.

    Args:
        network: Loaded.
        flow: From :func:`make_flow`.
        inputs: Images, prompt and state as tensors on the network's device.
        noise: Float32 [B, H, action_dim].
        rtc: What is left of the previous chunk, or None.

    Returns:
        Float32 [B, H, action_dim], normalised.
    """
    prefix = network.prefill(inputs)
    actions, delta = noise.float(), -1.0 / len(flow.steps)
    for step in flow.steps:
        constants = step
        if isinstance(rtc, Inpainting):
            assert flow.finished is not None, "trained real-time chunking is pi0.5's"
            actions = torch.where(rtc.given, rtc.previous, actions)
            constants = where_given(rtc.given, flow.finished, step)
        velocity = network.velocity(actions, constants, prefix)
        if isinstance(rtc, Guidance):
            error = rtc.weights * (rtc.previous - (actions - step.time * velocity))
            velocity = velocity - guidance_scale(step.time, rtc.limit) * error
        actions = actions + delta * velocity
        if isinstance(rtc, Inpainting):
            actions = torch.where(rtc.given, rtc.previous, actions)
    return actions


def where_given(given: Tensor, finished: StepConstants, step: StepConstants) -> StepConstants:
    """Choose constants per token, [B, H, width]: ``finished`` where the action is given, else ``step``."""

    def choose(one: Modulation, other: Modulation) -> Modulation:
        pairs = zip(one, other, strict=True)
        return Modulation(*(torch.where(given, a, b) for a, b in pairs if a is not None and b is not None))

    layers = tuple(
        (choose(first, other_first), choose(second, other_second))
        for (first, second), (other_first, other_second) in zip(finished.layers, step.layers, strict=True)
    )
    return StepConstants(step.time, None, layers, choose(finished.final, step.final))
