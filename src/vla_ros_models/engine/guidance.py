"""The end of a flow step: the velocity of noisy actions, its correction, and an Euler step."""

import torch
from torch import Tensor
from torch.nn import functional

from vla_ros_models.engine.stream import Guide


def predict_velocity(normed: Tensor, out: tuple[Tensor, Tensor], horizon: int) -> Tensor:
    """Return the velocity, float32 [B, H, A], from the last H rows of a stream after its last norm."""
    return functional.linear(normed[:, -horizon:].float(), *out)


def euler_step(actions: Tensor, velocity: Tensor, pull: Tensor, guide: Guide, time: float, delta: float) -> None:
    """Advance ``actions`` [B, H, A] in place by ``delta`` along ``velocity``, corrected by ``pull``."""
    scale = guide.limit.clamp(max=guidance_scale(time))[:, None, None]
    actions += delta * (velocity - scale * pull)
    actions.copy_(torch.where(guide.given[..., None] != 0, guide.previous, actions))


def guidance_scale(time: float) -> float:
    """Return the factor of the correction at ``time`` (1: noise, 0: actions); infinite at both ends."""
    done = 1.0 - time
    if done <= 0.0 or time <= 0.0:
        return float("inf")
    return time / done * (time**2 + done**2) / time**2
