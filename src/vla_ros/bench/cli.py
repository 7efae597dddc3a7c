"""Measure inference time, compared with plain PyTorch and with the machine's limits.

The baselines, over the same weights and images in the same run, are transformers' eager generate and a static KV
cache under torch.compile with CUDA graphs. --model tiny needs no checkpoint and runs on a CPU in under a minute; it
only shows that everything works.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from vla_ros.bench.times import Stopwatch
from vla_ros.config.show import add_config_arguments
from vla_ros.errors import MissingDependencyError, VlaRosError
from vla_ros.policies.base import policy_of
from vla_ros.policies.openvla import has_action_head
from vla_ros.policies.shipped import SHIPPED

MODELS = {
    **dict.fromkeys(("tiny", "openvla-7b"), "openvla"),
    **dict.fromkeys(("tiny-oft", "openvla-oft-7b", "openvla-oft-7b-aloha"), "oft"),
    **dict.fromkeys(("pi0", "pi05"), "pi"),
}
"""Model with random weights to the module that measures it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vla-ros bench``."""
    add_config_arguments(parser)
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="time any installed policy instead, with options from --config and -p; no baseline",
    )
    parser.add_argument(
        "--model",
        default="tiny",
        help=f"{', '.join(MODELS)} (random weights) or the folder of an OpenVLA",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4", "fp8"))
    parser.add_argument("--steps", type=int, default=0, help="measured steps; 0: 200 on a GPU, 3 on a CPU")
    parser.add_argument(
        "--pause", type=float, default=0.0, metavar="MS",
        help="rest between steps; without it a GPU may reach its power limit, which slows it down",
    )  # fmt: skip
    parser.add_argument("--prompt-tokens", type=int, default=22, help="tokens of the prompt, without patches")
    parser.add_argument("--images", type=int, default=3, help="pi0, pi05: cameras")
    parser.add_argument("--horizon", type=int, default=50, help="pi0, pi05: actions in a chunk")
    parser.add_argument("--flow-steps", type=int, default=10, help="pi0, pi05: Euler steps")
    parser.add_argument(
        "--frame",
        metavar="WxH",
        type=_frame_size,
        help="camera's frames; 1280x720 on a GPU, 320x240 on a CPU; pi0, pi05: 640x480",
    )
    parser.add_argument("--no-baseline", action="store_true", help="skip the baselines and free their weights")
    parser.add_argument("--no-compiled", action="store_true", help="skip the baseline under torch.compile")
    parser.add_argument(
        "--baseline-steps", type=int, default=0, metavar="N",
        help="steps of each baseline and its token comparison; 0: --steps, at most 200 (OFT and pi: 50)",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures; '-' prints them instead of a table"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a profile of three steps for ui.perfetto.dev"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, then print or write the figures."""
    for option, path in (("--json", arguments.json), ("--trace", arguments.trace)):
        # Check before minutes of measuring; the profiler would only warn.
        if path is not None and str(path) != "-" and not os.access(path.parent, os.W_OK):
            raise VlaRosError(f"{option} {path}: cannot be written; check that {path.parent} is a writable folder")
    # Check the numbers before importing torch, which takes seconds.
    if min(arguments.steps, arguments.baseline_steps, arguments.pause) < 0 or arguments.prompt_tokens < 2:
        raise VlaRosError(
            f"--steps {arguments.steps} --baseline-steps {arguments.baseline_steps} --pause {arguments.pause:g} "
            f"--prompt-tokens {arguments.prompt_tokens}: expected no negative "
            "number (0 steps: the default), and a prompt of at least two tokens"
        )
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("bench needs torch: pip install 'vla_ros[openvla]'")
    Stopwatch.pause = 1e-3 * arguments.pause
    module = importlib.import_module(f"vla_ros.bench.{_module(arguments)}")
    result = module.bench(arguments, _progress())
    rounded = json.loads(json.dumps(result), parse_float=lambda text: round(float(text), 5))
    text = json.dumps(rounded, indent=2)
    if arguments.json is not None and str(arguments.json) == "-":
        print(text)
        return 0
    print(module.render(result))
    if arguments.json is not None:
        try:
            arguments.json.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise VlaRosError(f"--json {arguments.json}: cannot be written ({error.strerror})") from None
    return 0


def _module(arguments: argparse.Namespace) -> str:
    if arguments.policy:
        return "policy"
    model = arguments.model
    if model in MODELS:
        return MODELS[model]
    if model not in SHIPPED and not Path(model).is_dir():
        raise VlaRosError(f"--model {model}: expected a checkpoint's folder or one of {', '.join(MODELS)}")
    name = "oft" if has_action_head(Path(model)) else policy_of(model)
    if name != "openvla" or model in SHIPPED:
        how = f"--policy {name} -p policy.checkpoint:={model}"
        raise VlaRosError(f"--model {model}: a checkpoint of the policy '{name}'; time it with {how}")
    return name


def _frame_size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f"{text}: expected WIDTHxHEIGHT in pixels, such as 1280x720")
    return int(height), int(width)


def _progress() -> Any:
    from vla_ros.policies.base import no_progress

    if not sys.stderr.isatty():
        return no_progress
    from vla_ros.node.run import loading_bar

    return loading_bar()
