"""Options of policies that sample chunks by flow matching, and what a checkpoint says about them; without torch."""

from dataclasses import dataclass

from vla_ros.config.options import option
from vla_ros.policies.options import SamplingOptions

RTC_SCHEDULES = ("LINEAR", "EXP", "ONES", "ZEROS")
MODES = ("guided", "jacobian", "trained")


@dataclass(frozen=True)
class FlowOptions(SamplingOptions):
    """How a flow-matching policy samples and continues chunks."""

    rtc: str = option(
        "auto",
        "How a chunk continues the previous one: guided, jacobian (guided by its gradient, slower), trained (pi0.5 "
        "trained for it), or auto: as the checkpoint states, else trained if it supports that, otherwise guided",
        choices=("auto", *MODES),
    )
    rtc_horizon: int = option(
        0,
        "Number of actions of the previous chunk that guide the new one; 0: the checkpoint's, else all left",
        low=0,
    )
    rtc_schedule: str = option(
        "auto",
        "How guidance falls from the first action that can still change to rtc_horizon; auto: as the checkpoint "
        "states, else linear",
        choices=("auto", *(name.lower() for name in RTC_SCHEDULES)),
    )
    rtc_max_guidance: float = option(0.0, "Maximum factor of the guidance; 0: the checkpoint's, else 10", low=0.0)


@dataclass(frozen=True)
class RtcSettings:
    """How a checkpoint continues chunks, where the options leave it open."""

    mode: str = "auto"  # as ``policy.rtc``
    horizon: int = 0  # as ``policy.rtc_horizon``
    schedule: str = "LINEAR"  # how the weight falls between the delay and the horizon
    max_guidance: float = 10.0  # maximum factor of the correction
