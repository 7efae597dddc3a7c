"""Options of every policy that runs a checkpoint's network in this process."""

from dataclasses import dataclass

from vla_ros.config.options import PolicyConfig, option


@dataclass(frozen=True)
class NetworkOptions(PolicyConfig):
    """The checkpoint and where its network runs."""

    checkpoint: str = option(
        "",
        "Folder of the checkpoint (config.json, safetensors, tokenizer), or the name of one that comes with the "
        "package: demo, demo-pi",
    )
    base: str = option(
        "",
        "Folder of the base model into which the checkpoint's adapter (PEFT) is merged; empty: the one that "
        "adapter_config.json names, if it is a folder here",
    )
    view: str = option(
        "",
        "File of a viewpoint adapter (vla-ros finetune --adapter view), which becomes part of the weights at load; "
        "empty: none",
    )
    device: str = option("auto", "Where the model runs: auto, cpu, cuda or cuda:N")
    dtype: str = option(
        "auto",
        "Data type of weights and arithmetic; auto is bfloat16 on CUDA and for quantised weights, else float32",
        choices=("auto", "float32", "bfloat16"),
    )
    quantization: str = option("none", "Format of quantised weights", choices=("none",))
    threads: int = option(0, "CPU threads of the model; 0 leaves the library's default", low=0, high=1024)
    self_test: bool = option(True, "Refuse to start if two different images give the same action")
    evidence: str = option(
        "ignore",
        "require: refuse to start unless the checkpoint's folder evidence/ has a comparison in closed loop",
        choices=("ignore", "require"),
    )


@dataclass(frozen=True)
class SamplingOptions(NetworkOptions):
    """Options of policies that sample chunks."""

    flow_steps: int = option(0, "Euler steps from noise to actions; 0: the checkpoint's", low=0, high=1000)
    seed: int = option(0, "Seed of the noise; the same seed gives the same chunks", low=0, high=2**31 - 1)
