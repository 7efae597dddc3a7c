"""The section ``control``: when and how actions become commands."""

from dataclasses import dataclass

from vla_ros.config.options import option

VELOCITY_OUTPUTS = ("twist_stamped", "joint_velocity", "joint_velocity_state")
"""Outputs with which the arm keeps moving until the next command."""
ARM_OUTPUTS = (*VELOCITY_OUTPUTS, "joint_group_command")
"""Outputs that cannot carry finger positions."""
OUTPUTS = ("joint_state", "float64_multi_array", "joint_trajectory", *ARM_OUTPUTS)
ENVIRONMENT = "environment"
"""Output of an arm in a simulator that takes actions in its own units; it has no message type."""
SCHEDULES = ("auto", "sync", "append", "blend", "ensemble", "rtc")


@dataclass(frozen=True)
class ControlConfig:
    """When and how actions become commands."""

    armed: bool = option(False, "true: the arm moves as soon as frames arrive. false: it waits for ~/enable")
    rate_hz: float = option(
        -1.0,
        "Maximum rate of steps; 0: one step per new frame; -1: the rate at which the policy was trained (stated by "
        "the policy, or else features.rate_hz), or 5 if it is unknown",
        "Hz",
        0,
        1000,
        unset=-1,
        live=True,
    )
    command_rate_hz: float = option(
        0.0,
        "Rate of commands interpolated between steps, rounded to a whole number per step; 0: no commands between "
        "steps. Not with velocities or node.clock inputs",
        "Hz",
        0,
        1000,
        live=True,
    )
    output: str = option(
        "joint_state",
        "Message type of the command. environment: the action itself (vla-ros eval)",
        choices=(*OUTPUTS, ENVIRONMENT),
    )
    max_overshoot: float = option(
        10.0,
        "A chunk is invalid if a number is this many times further from the middle than the range of the robot, or "
        "of the checkpoint's statistics, allows; 0: any finite number",
        low=0,
        high=1e9,
        live=True,
    )
    execute_steps: int = option(
        0,
        "Steps of a chunk to execute before the next inference; 0: as many as the published evaluation does, or "
        "else all",
        low=0,
        high=1000,
        live=True,
    )
    schedule: str = option(
        "auto",
        "How chunks follow each other. sync infers when the plan has ended, and the arm waits. The others infer "
        "while it moves: append keeps the new chunk unchanged, blend fades to it within blend_steps, ensemble "
        "averages chunks as ACT does, and with rtc the policy continues the old chunk. auto: sync for single "
        "steps, ensemble if the checkpoint states it, rtc if the policy can, else blend",
        choices=SCHEDULES,
    )
    refill_steps: int = option(
        0,
        "Remaining steps of the plan at which the next chunk is requested. 0: the policy's latency in steps (95th "
        "percentile of the last 20), plus blend_steps (append: plus 1)",
        low=0,
        high=1000,
        live=True,
    )
    blend_steps: int = option(
        4, "Steps over which blend fades to the new chunk, and steps left when the chunk is due", low=1, high=1000
    )
    ensemble_decay: float = option(
        -1.0,
        "ACT's m: weights are exp(-m i) with i = 0 for the oldest chunk; -1: the checkpoint's, or else 0.01",
        low=0,
        high=100,
        unset=-1,
    )
    inject_delay_ms: float = option(
        0.0, "Simulation only: additional delay of each inference", "ms", 0, 1e4, live=True
    )
    delta_frame: str = option("base", "Axes in which deltas of the tip are given", choices=("base", "tip"))
    rotation: str = option(
        "euler_xyz",
        "Rotation part of a delta: fixed-axis roll, pitch, yaw or a rotation vector",
        choices=("euler_xyz", "rotation_vector"),
    )
    translation_scale: float = option(
        1.0, "Metres per unit of the action's translation (LIBERO: 0.05)", "m", 1e-6, 10
    )
    rotation_scale: float = option(1.0, "Radians per unit of the action's rotation (LIBERO: 0.5)", "rad", 1e-6, 10)
    joint_velocity_scale: float = option(
        0.0,
        "Velocity of every joint at 1 in joint_velocity[1] (DROID: 3); 0: the joint's velocity limit",
        "rad/s",
        0,
        100,
    )
    clip: str = option(
        "none",
        "Numbers of a delta or of joint_velocity[1] beyond clip_at: each is clipped alone (each: openpi's DROID "
        "client, LIBERO, Bridge), or all are shortened together (together: DROID's robot; joints by the largest "
        "number, translation and rotation by their lengths)",
        choices=("none", "each", "together"),
    )
    clip_at: tuple[float, ...] = option(
        (1.0,),
        "Largest number that clip leaves, before scaling: one for all, or translation and rotation (Bridge: 0.05, "
        "0.25)",
        low=1e-6,
        high=1e3,
        length=(1, 2),
    )
    delta_form: str = option(
        "step",
        "What a delta of the tip is. step: the motion of one step. Actions of LIBERO (robosuite's OSC_POSE) are "
        "the goals of a compliant controller, which covers about a quarter of the distance in a step: goal sends "
        "these goals, for a simulator with that controller; motion sends the motion that the controller makes, for "
        "an arm. choose: refuse to start until one of the two is set",
        choices=("step", "goal", "motion", "choose"),
    )
    arms_hold_alone: bool = option(
        False, "true: an arm that must hold does not stop the others. false: all arms hold together", live=True
    )
    delta_from: str = option(
        "commanded",
        "Position to which a delta is added: the last commanded one (after a hold, the measured one), or always "
        "the measured one (LIBERO, DROID), with which an arm that sags sinks. A velocity output always starts at "
        "the measured one",
        choices=("measured", "commanded"),
    )
