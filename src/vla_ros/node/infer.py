"""Run a policy once on an observation from files, prepared as in the node, and print the result.

vla-ros infer --checkpoint DIR --image front.png --instruction "pick up the cup"
vla-ros infer --config robot.yaml --image front=a.png --image wrist=b.png --state joints=0,0.4,0,-2,0,2,0
"""

import argparse
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vla_ros.config import CameraConfig, Config, entries, load
from vla_ros.config.loading import assignment
from vla_ros.config.show import add_config_arguments
from vla_ros.contract.features import complete_spec
from vla_ros.contract.spec import NOW, PolicySpec
from vla_ros.errors import ConfigError, ImageError
from vla_ros.files import STANDARD_OUTPUT, check_output, read_bytes, save_text
from vla_ros.policies.base import checkpoint_options, create
from vla_ros.types import ActionChunk, FloatArray, Observation, RawImage, UInt8Array
from vla_ros.vision.decode import MAX_PIXELS, turned
from vla_ros.vision.preprocess import LazyImages, Preprocessor, process

_MOST_IMAGE = 256 << 20  # bytes of an image file, and of a file with noise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="the same as -p policy.checkpoint:=DIR")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="[KEY=]FILE",
        help="image file; without KEY, in the policy's order. Repeat it for each delta timestamp, oldest "
        "first, or give one for all",
    )
    parser.add_argument(
        "--state",
        action="append",
        default=[],
        metavar="[KEY=]1,2,3",
        help="numbers of a state vector, or without KEY of all vectors together, in the policy's order. Past "
        "values as for --image",
    )
    parser.add_argument("--instruction", metavar="TEXT", help="the same as -p policy.instruction:=TEXT")
    noise = parser.add_mutually_exclusive_group()
    noise.add_argument("--seed", type=int, metavar="N", help="seed of the noise that the policy starts from")
    noise.add_argument("--noise", type=Path, metavar="FILE.npy", help="the noise itself, as an array")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything as JSON; - prints it")


def run(arguments: argparse.Namespace) -> int:
    check_output("--json", arguments.json)
    assignments = [*checkpoint_options(None, arguments.checkpoint, arguments.config), *arguments.param]
    if arguments.instruction is not None:
        assignments.append(assignment("policy.instruction", arguments.instruction))
    config = load(arguments.config, assignments)
    if not config.policy.instruction and arguments.instruction is None:
        raise ConfigError('--instruction is missing: say what to do, such as --instruction "pick up the cup"')
    if arguments.seed is not None and "policy.seed" not in entries(config):
        raise ConfigError(f"--seed: the policy '{config.policy.name}' has no policy.seed")
    if arguments.seed is not None:
        config = load(arguments.config, [*assignments, f"policy.seed:={arguments.seed}"])
    result = ask(config, arguments.image, arguments.state, arguments.noise)
    text = json.dumps(result, indent=2)
    if arguments.json is not None:
        save_text(arguments.json, text + "\n")
    if arguments.json != STANDARD_OUTPUT:
        print(_render(result))
    return 0


def ask(config: Config, images: Sequence[str], states: Sequence[str], noise: Path | None = None) -> dict[str, Any]:
    """Load the policy of ``config`` and run it once; return observation and result, ready for JSON.

    ``images`` are strings ``[KEY=]FILE``, ``states`` strings ``[KEY=]1,2,3``. ``noise`` is a .npy file with the
    noise that a sampling policy starts from (``PolicySpec.noise``). Robot sections of ``config`` may be empty.
    """
    policy = create(config)
    policy.load()
    try:
        spec = complete_spec(policy.spec, config)
        observation = _observation(spec, config, images, states, noise)
        session = policy.start_session()
        chunk = policy.infer(session, observation)
        session.close()
        return _result(config, spec, observation, chunk)
    finally:
        policy.close()


def _observation(
    spec: PolicySpec, config: Config, images: Sequence[str], states: Sequence[str], noise: Path | None
) -> Observation:
    files = _by_key(images, spec.image_keys, "--image")
    missing = [image.key for image in spec.images if image.required and image.key not in files]
    if missing:
        raise ConfigError(f"--image: no file for {', '.join(missing)}; the policy needs one for each")
    preprocessor = Preprocessor(_cameras(spec, config), spec)
    makers, raw = {}, {}
    for index, image in enumerate(spec.images):
        found = [preprocessor.raw(_read(Path(file)), index) for file in files.get(image.key, ())]
        if not found:
            continue
        chosen = _for_each_time(found, len(image.delta_timestamps), f"--image: '{image.key}'")
        if image.delta_timestamps == NOW:
            raw[image.key], makers[image.key] = chosen[0], partial(process, chosen[0])
        else:
            makers[image.key] = partial(_stack, chosen)
    return Observation(
        LazyImages(makers), config.policy.instruction, 0, _states(spec, states), raw, _noise(spec, noise)
    )


def _cameras(spec: PolicySpec, config: Config) -> CameraConfig:
    """Return a camera for each image: the configured camera of that name, or default options."""
    known = {camera.key: camera for camera in config.camera.each}
    plain = CameraConfig().each[0]
    found = [known.get(image.source, plain) for image in spec.images]
    return CameraConfig(
        topics=tuple(image.key for image in spec.images),
        keys=tuple(image.source for image in spec.images),
        orientation=tuple(camera.orientation for camera in found),
        processor=tuple(camera.processor for camera in found),
        crop_area=tuple(camera.crop_area for camera in found),
    )


def _by_key(given: Sequence[str], keys: Sequence[str], option: str) -> dict[str, list[str]]:
    """Group the arguments by key; assign those without a key to the remaining keys in order."""
    found: dict[str, list[str]] = {}
    waiting = list(keys)
    for text in given:
        key, separator, value = text.partition("=")
        if not separator or (key not in keys and Path(text).exists()):
            if not waiting:
                taken = f"each of {', '.join(keys)} has a value already" if keys else "the policy takes none"
                raise ConfigError(f"{option}: found {text!r}, but {taken}")
            key, value = waiting[0], text
        if key not in keys:
            expected = f"expected one of {', '.join(keys)}" if keys else "but the policy takes none"
            raise ConfigError(f"{option}: found '{key}', {expected}")
        waiting = [other for other in waiting if other != key]
        found.setdefault(key, []).append(value)
    return found


def _read(path: Path) -> UInt8Array:
    try:
        content = read_bytes(path, _MOST_IMAGE)
        with Image.open(io.BytesIO(content)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels, allowed {MAX_PIXELS}")
            return turned(np.array(image.convert("RGB"), np.uint8), memoryview(content))
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and more
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ImageError(f"--image {path}: cannot be read as an image ({why})") from None


def _stack(images: Sequence[RawImage]) -> UInt8Array:
    return np.stack([process(image) for image in images])


def _for_each_time(found: list[Any], times: int, what: str) -> list[Any]:
    if len(found) not in (1, times):
        raise ConfigError(f"{what}: found {len(found)}, expected one, or one for each of {times} delta timestamps")
    return found if len(found) == times else found * times


def _states(spec: PolicySpec, given: Sequence[str]) -> dict[str, FloatArray]:
    if len(given) == 1 and "=" not in given[0] and len(spec.state) > 1 and all(state.size for state in spec.state):
        given = _split(given[0], spec)
    texts = _by_key(given, [state.key for state in spec.state], "--state")
    vectors = {}
    for state in spec.state:
        option = f"--state: '{state.key}'"
        rows = [_numbers(text, option) for text in texts.get(state.key, ())]
        if not rows:
            size = f" of {state.size} numbers" if state.size else ""
            raise ConfigError(f"{option}: found nothing, but the policy needs a vector{size}")
        wrong = [len(row) for row in rows if len(row) != (state.size or len(rows[0]))]
        if wrong:
            raise ConfigError(f"{option}: found {wrong[0]} numbers, expected {state.size or len(rows[0])}")
        chosen = _for_each_time(rows, len(state.delta_timestamps), option)
        vectors[state.key] = chosen[0] if state.delta_timestamps == NOW else np.stack(chosen)
    return vectors


def _split(text: str, spec: PolicySpec) -> list[str]:
    """Split the numbers of all state vectors into one option for each."""
    numbers, total = _numbers(text, "--state").tolist(), sum(state.size for state in spec.state)
    if len(numbers) != total:
        wanted = ", ".join(f"{state.key} ({state.size})" for state in spec.state)
        raise ConfigError(f"--state: found {len(numbers)} numbers, expected {total}: {wanted}")
    left = iter(numbers)
    return [f"{state.key}={','.join(repr(next(left)) for _ in range(state.size))}" for state in spec.state]


def _numbers(text: str, option: str) -> FloatArray:
    try:
        numbers = np.array([float(number) for number in text.split(",")])
    except ValueError:
        numbers = np.array([np.nan])
    if not np.isfinite(numbers).all():
        raise ConfigError(f"{option}: found {text!r}, expected numbers separated by commas")
    return numbers


def _noise(spec: PolicySpec, path: Path | None) -> FloatArray | None:
    if path is None:
        return None
    if not spec.noise:
        raise ConfigError("--noise: the policy does not start from noise")
    try:
        noise = np.load(io.BytesIO(read_bytes(path, _MOST_IMAGE)), allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError) as error:
        raise ConfigError(f"--noise {path}: cannot be read as an array ({error})") from None
    if noise.shape != spec.noise or noise.dtype.kind != "f" or not np.isfinite(noise).all():
        raise ConfigError(
            f"--noise {path}: found {noise.dtype} {list(noise.shape)}, expected finite numbers {list(spec.noise)}"
        )
    return np.asarray(noise, dtype=np.float64)


def _result(config: Config, spec: PolicySpec, observation: Observation, chunk: ActionChunk) -> dict[str, Any]:
    return {
        "policy": config.policy.name,
        "checkpoint": getattr(config.policy, "checkpoint", ""),
        "instruction": observation.instruction,
        "images": {key: _described(image) for key, image in observation.images.items()},
        "state": {key: vector.tolist() for key, vector in observation.state.items()},
        "components": [str(component) for component in spec.action],
        "actions": chunk.actions.tolist(),
        "normalized": None if chunk.normalized is None else chunk.normalized.tolist(),
        "tokens": None if chunk.tokens is None else chunk.tokens.tolist(),
        "stages_ms": dict(chunk.stages_ms),
        "info": {key: value for key, value in chunk.info.items() if isinstance(value, (str, int, float, bool))},
    }


def _described(image: UInt8Array) -> dict[str, Any]:
    """Return an image's shape and digest, to compare the policy's input on two machines."""
    return {"shape": list(image.shape), "sha256": hashlib.sha256(image.tobytes()).hexdigest()}


def _render(result: Mapping[str, Any]) -> str:
    lines = [f"policy '{result['policy']}': {result['instruction']}"]
    lines += [f"image {key}: {'x'.join(map(str, one['shape']))}" for key, one in result["images"].items()]
    lines += [f"state {key}: {numbers}" for key, numbers in result["state"].items()]
    for name in ("actions", "normalized"):
        rows = result[name]
        if rows is not None:
            what = f" ({' + '.join(result['components'])})" if name == "actions" and result["components"] else ""
            lines.append(f"{name}{what}")
            lines += ["  " + " ".join(f"{number:9.4f}" for number in row) for row in rows]
    if result["tokens"] is not None:
        lines.append(f"tokens {result['tokens']}")
    lines += [f"{name:<16}{milliseconds:>9.2f} ms" for name, milliseconds in result["stages_ms"].items()]
    return "\n".join(lines)
