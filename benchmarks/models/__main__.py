"""Times a model family from camera messages to actions, against plain PyTorch and the machine's limits.

    python -m benchmarks.models openvla-7b [--quantization fp8]
    python -m benchmarks.models tiny

The baselines, over the same weights and images in the same run, are transformers' eager generate and a static KV
cache under torch.compile with CUDA graphs. ``tiny`` needs no checkpoint and runs on a CPU in under a minute; it
only shows that everything works.
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from vla_ros.config.show import number
from vla_ros.errors import VlaRosError
from vla_ros.files import check_output
from vla_ros_lab.bench.cli import add_measurement_arguments, show
from vla_ros_lab.bench.times import Stopwatch

MODELS = {
    **dict.fromkeys(("tiny", "openvla-7b"), "openvla"),
    **dict.fromkeys(("tiny-oft", "openvla-oft-7b", "openvla-oft-7b-points", "openvla-oft-7b-aloha"), "oft"),
    **dict.fromkeys(("pi0", "pi05"), "pi"),
    "smolvla": "smolvla",
    "groot-n1.7": "groot",
}
"""Model with random weights to the module that measures it."""


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help=f"{', '.join(MODELS)} (random weights) or the folder of an OpenVLA")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    add("--quantization", default="none", choices=("none", "int8", "int4", "fp8"))
    add("--prompt-tokens", type=number(int, 2), default=22, help="tokens of the prompt, without patches")
    add("--images", type=int, help="cameras (pi0, pi05: 3; smolvla, groot-n1.7: 2)")
    add("--horizon", type=int, help="actions in a chunk (pi0, pi05, smolvla: 50; groot-n1.7: 40)")
    add("--flow-steps", type=int, help="Euler steps (pi0, pi05, smolvla: 10; groot-n1.7: 4)")
    sizes = "camera's frames; 1280x720 on a GPU, 320x240 on a CPU; others: 640x480"
    add("--frame", metavar="WxH", type=_frame_size, help=sizes)
    add("--no-baseline", action="store_true", help="skip the baselines and free their weights")
    add("--no-compiled", action="store_true", help="skip the baseline under torch.compile")
    text = "steps of each baseline and its token comparison; 0: --steps, at most 200 (OFT and pi: 50)"
    add("--baseline-steps", type=number(int, 0), default=0, metavar="N", help=text)
    add("--trace", type=Path, metavar="FILE", help="write a profile of three steps for ui.perfetto.dev")
    add_measurement_arguments(parser, steps=0)  # 0: 200 on a GPU, 3 on a CPU
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    arguments = parse(words)
    try:
        check_output("--json", arguments.json)
        check_output("--trace", arguments.trace)
        if arguments.model not in MODELS and not Path(arguments.model).is_dir():
            raise VlaRosError(f"{arguments.model}: expected a checkpoint's folder or one of {', '.join(MODELS)}")
        Stopwatch.rest = 1e-3 * arguments.rest_ms
        module = import_module(f"benchmarks.models.{MODELS.get(arguments.model, 'openvla')}")
        result = module.bench(arguments)
        show(result, module.render(result), arguments.json)
    except VlaRosError as error:
        print(f"benchmarks.models: {error}", file=sys.stderr)
        return 1
    return 0


def _frame_size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f"{text}: expected WIDTHxHEIGHT in pixels, such as 1280x720")
    return int(height), int(width)


if __name__ == "__main__":
    sys.exit(main())
