"""Options of OpenVLA (``policy.name: openvla``), and those shared with ``oft``."""

from dataclasses import dataclass

from vla_ros.config.options import option
from vla_ros.policies.options import NetworkOptions
from vla_ros_models.engine.shapes import MOST_GPUS


@dataclass(frozen=True)
class CheckpointOptions(NetworkOptions):
    """Options of every checkpoint with OpenVLA's network."""

    unnorm_key: str = option(
        "", "Dataset whose statistics un-normalise actions; required if the checkpoint has several"
    )
    quantization: str = option(
        "none",
        "Weights of the language model, which the engine runs: int8 (one scale per output), int4 (scale and zero "
        "point per 128 weights) or fp8 (from compute capability 8.9 on)",
        choices=("none", "int8", "int4", "fp8"),
    )
    gpus: int = option(
        1,
        "GPUs of this machine over which the model is split, from policy.device on, with a process on each; for "
        "policy.device cpu, processes",
        low=1,
        high=MOST_GPUS,
    )
    engine: str = option(
        "auto",
        "How OpenVLA runs: graph (this package's engine, for NVIDIA GPUs), reference (plain torch), "
        "or auto: graph if its kernels run and agree with the reference, or weights are quantised",
        choices=("auto", "reference", "graph"),
    )


@dataclass(frozen=True)
class OpenVLAOptions(CheckpointOptions):
    """Options that only OpenVLA has."""

    prompt: str = option(
        "auto", "Prompt template; auto reads it from the checkpoint", choices=("auto", "v0.1", "v0.2")
    )
    drafts: str = option(
        "prefill",
        "Engine: how the previous action's tokens are used as a draft; verify equals plain decoding bit for bit",
        choices=("none", "verify", "prefill"),
    )
