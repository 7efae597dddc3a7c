"""Converts observations to the model's inputs, prompt included, and chunks to the robot's actions.

All functions are pure and need no torch. Inputs are processed in the order of training: robot conversion,
normalisation, prompt, padding. Chunks are un-normalised, made absolute and converted for the robot. Openpi's
checkpoints do not state their robot; it follows from the name of the training configuration.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vla_ros.errors import CheckpointError, ConfigError
from vla_ros.types import ImageProcessor, IntArray, RawImage, UInt8Array
from vla_ros.vision.processors import LinearResize, ResizeWithPad, resize_with_pad, resize_with_pad_linear
from vla_ros_models.normalization import Array, LearnedStatistics, Normalization
from vla_ros_models.pi.architecture import PI0, PI05
from vla_ros_models.tokenizers import Tokenizer, find_file, read_tokenizer

BASE, LEFT_WRIST, RIGHT_WRIST = "base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"

_NO_DELTA: Mapping[str, tuple[bool, ...]] = MappingProxyType({})
_ARM = (True,) * 6 + (False,)


@dataclass(frozen=True)
class Robot:
    """A robot as configured in openpi's training."""

    name: str  # as in presets
    asset: str  # folder below ``assets`` with its statistics
    images: tuple[str, ...]  # keys in the model's order
    state: int  # numbers in the state
    actions: int  # numbers in one action
    optional_images: tuple[str, ...] = ()  # keys of images that may be missing
    # For each model, True for action dimensions relative to the state. A model without an entry has none.
    delta: Mapping[str, tuple[bool, ...]] = field(default_factory=lambda: _NO_DELTA)
    adapt: bool = False  # True if joints and grippers are converted to openpi's convention for ALOHA
    prompt_state: bool = True  # False if pi0.5 was trained without the state in its prompt
    # Names of the images in openpi's server.
    image_keys: tuple[str, ...] = ("observation/image", "observation/wrist_image")
    # Names of the state's parts in openpi's server, with their sizes.
    state_keys: tuple[tuple[str, int], ...] = (("observation/state", 8),)


_DROID = Robot(
    "droid",
    "droid",
    (BASE, LEFT_WRIST),
    state=8,
    actions=8,
    image_keys=("observation/exterior_image_1_left", "observation/wrist_image_left"),
    state_keys=(("observation/joint_position", 7), ("observation/gripper_position", 1)),
)
_ALOHA = Robot(
    "aloha",
    "trossen",
    (BASE, LEFT_WRIST, RIGHT_WRIST),
    state=14,
    actions=14,
    optional_images=(LEFT_WRIST, RIGHT_WRIST),
    delta=dict.fromkeys((PI0, PI05), _ARM * 2),
    adapt=True,
    image_keys=("images.cam_high", "images.cam_left_wrist", "images.cam_right_wrist"),
    state_keys=(("state", 14),),
)

ROBOTS: Mapping[str, Robot] = {
    robot.name: robot
    for robot in (
        Robot(
            "libero",
            "physical-intelligence/libero",
            (BASE, LEFT_WRIST),
            state=8,
            actions=7,
            delta={PI0: _ARM},
            prompt_state=False,
        ),
        _DROID,  # joint velocities are not relative to the state
        replace(_DROID, name="droid_joint_position", delta=dict.fromkeys((PI0, PI05), (True,) * 7 + (False,))),
        _ALOHA,
        replace(_ALOHA, name="aloha_sim", asset="lerobot/aloha_sim_transfer_cube_human", delta=_NO_DELTA),
    )
}


def find_robot(name: str) -> Robot:
    if name not in ROBOTS:
        raise ConfigError(f"policy.robot: found {name!r}, expected one of {sorted(ROBOTS)}")
    return ROBOTS[name]


def add_state(actions: Array, state: Array, mask: tuple[bool, ...]) -> Array:
    """Add ``state`` to actions [..., D], in the dimensions where ``mask`` is True."""
    result = np.array(actions)
    chosen = np.flatnonzero(mask)
    result[..., chosen] += state[chosen]
    return result


# ALOHA has two arms with six joints and a gripper each. In openpi's convention, some joints turn the other way, and
# a gripper is an angle, where ALOHA's runtime has a fraction of the finger's travel.
_SIGNS = np.array([1, -1, -1, 1, 1, 1, 1] * 2, dtype=np.float64)
_GRIPPERS = [6, 13]
_FINGER_CLOSED, _FINGER_OPEN = 0.01844, 0.05800  # metres
_ARM_LENGTH, _HORN_RADIUS = 0.036, 0.022  # metres
_JOINT_CLOSED, _JOINT_OPEN = -0.6213, 1.4910  # radians, the gripper joint's range in ALOHA's runtime


class AlohaGripper(NamedTuple):
    """A model's convention for ALOHA's grippers."""

    closed: float  # radians, 0 in the model's state
    open: float  # radians, 1 in the model's state
    unit: float  # radians of 1 in the model's actions, which begin at ``closed``


OPENPI_GRIPPER = AlohaGripper(0.5476, 1.6296, 1.0)


def aloha_state(state: Array, gripper: AlohaGripper = OPENPI_GRIPPER) -> Array:
    """Convert ALOHA's state [..., 14] to the model's convention."""
    result = state * _SIGNS
    finger = result[..., _GRIPPERS] * (_FINGER_OPEN - _FINGER_CLOSED) + _FINGER_CLOSED
    sine = (_HORN_RADIUS**2 + finger**2 - _ARM_LENGTH**2) / (2 * _HORN_RADIUS * finger)
    angle = np.arcsin(np.clip(sine, -1.0, 1.0))
    result[..., _GRIPPERS] = (angle - gripper.closed) / (gripper.open - gripper.closed)
    return result


def aloha_actions(actions: Array, gripper: AlohaGripper = OPENPI_GRIPPER) -> Array:
    """Convert actions [..., 14] from the model's convention to that of ALOHA's runtime.

    This is not the inverse of :func:`aloha_state`: in actions the gripper is a joint command, in the state a
    measured width.
    """
    result = actions * _SIGNS
    angle = result[..., _GRIPPERS] * gripper.unit + gripper.closed
    result[..., _GRIPPERS] = (angle - _JOINT_CLOSED) / (_JOINT_OPEN - _JOINT_CLOSED)
    return result


def aloha_targets(actions: Array, gripper: AlohaGripper = OPENPI_GRIPPER) -> Array:
    """Convert actions [..., 14] of ALOHA's runtime to the model's convention."""
    result = actions * _SIGNS
    angle = actions[..., _GRIPPERS] * (_JOINT_OPEN - _JOINT_CLOSED) + _JOINT_CLOSED
    result[..., _GRIPPERS] = (angle - gripper.closed) / gripper.unit
    return result


PAD, EOS, BOS = 0, 1, 2
SPECIAL = {"<pad>": PAD, "<eos>": EOS, "<bos>": BOS}
_FILES = ("tokenizer.json", "tokenizer.model", "paligemma_tokenizer.model")


def find_tokenizer(folder: Path, chosen: str = "", stated: str = "", model: Path | None = None) -> Path:
    """Find the tokenizer's file in the folder ``chosen``, or if empty, in the checkpoint or its base ``model``.

    The subfolder ``tokenizer`` is searched, too; ``chosen`` may also be the file itself. ``stated`` is the name in
    the checkpoint: a folder in the checkpoint, or PaliGemma's name on the hub.
    """
    own = [folder] if model is None else [folder, model]
    named = [place / stated for place in own if stated and (place / stated).is_dir()]
    if stated and not chosen and not named and "paligemma" not in stated.lower():
        raise CheckpointError(
            f"{folder}: tokenizer_name: found {stated!r}, expected a folder in the checkpoint or PaliGemma's "
            "tokenizer; set policy.tokenizer to the folder of the one used in training"
        )
    places = [Path(chosen).expanduser()] if chosen else named or own
    for base in places:
        found = base if base.is_file() else find_file(base, _FILES) or find_file(base / "tokenizer", _FILES)
        if found is not None:
            return found
    raise CheckpointError(
        f"{places[0]}: no tokenizer ({', '.join(_FILES)}) here or in tokenizer/. Many checkpoints lack it: fetch "
        "tokenizer.json of google/paligemma-3b-pt-224 once and set policy.tokenizer to its path"
    )


def load_tokenizer(path: Path, vocabulary: int) -> Tokenizer:
    """Read a tokenizer; raises CheckpointError without ``vocabulary`` pieces and PaliGemma's control tokens."""
    tokenizer = read_tokenizer(path)
    if tokenizer.size != vocabulary or tokenizer.special != SPECIAL:
        raise CheckpointError(
            f"{path}: {tokenizer.size} pieces with {tokenizer.special}, but the checkpoint was trained with "
            f"{vocabulary} pieces and {SPECIAL}; the tokenizer belongs to another model (Gemma's own has 256000 "
            "pieces, PaliGemma's 257152)"
        )
    line_break = tokenizer.encode("\n")
    if len(line_break) != 1:
        raise CheckpointError(f"{path}: a line break is {line_break}, expected one piece as for PaliGemma")
    return tokenizer


BINS = 256
_BIN_EDGES = np.linspace(-1, 1, BINS + 1)[:-1]


@dataclass(frozen=True)
class PromptForm:
    """Format of a checkpoint's prompts in training."""

    length: int  # maximum tokens including BOS; longer prompts are truncated
    # ``none``: the instruction and a line break. ``as_is``: pi0.5's sentence with the state's numbers. ``padded``:
    # the same, with the state padded with zeros to ``padded_state``, as in LeRobot before 0.5.0.
    state: str = "none"
    clean: bool = True  # True strips the instruction and replaces underscores and line breaks with spaces
    padded_state: int = 32  # length of a padded state
    line_break: bool = True  # True ends a prompt without state with a line break


def state_bins(state: Array) -> IntArray:
    """Compute the bin of each normalised number: 0 to 255 over [-1, 1), -1 below, 255 above."""
    bins: IntArray = np.digitize(state, _BIN_EDGES).astype(np.int64) - 1
    return bins


def prompt_parts(instruction: str, form: PromptForm, state: Array) -> tuple[str, ...]:
    """Compose the prompt from the instruction and the normalised state, as parts to tokenise separately."""
    text = instruction
    if form.clean or form.state != "none":
        text = instruction.strip().replace("_", " ").replace("\n", " ")
    if form.state == "none":
        if form.clean:
            return text, "\n"
        return (text if text.endswith("\n") or not form.line_break else f"{text}\n",)
    if form.state == "padded":
        state = np.pad(state, (0, max(0, form.padded_state - len(state))))
    numbers = " ".join(str(number) for number in state_bins(state))
    return (f"Task: {text}, State: {numbers};\nAction: ",)


def prompt_tokens(
    encode: Callable[[str], list[int]], instruction: str, form: PromptForm, state: Array
) -> NDArray[np.int64]:
    """Encode the prompt as int64 [L], beginning with BOS and truncated to ``form.length``."""
    if not instruction.strip():
        raise ConfigError("policy.instruction: empty; say what the robot should do")
    ids = [BOS]
    for part in prompt_parts(instruction, form, state):
        ids += encode(part)
    return np.asarray(ids[: form.length], dtype=np.int64)


@dataclass(frozen=True)
class Processing:
    """Prepares inputs and actions as in the checkpoint's training."""

    centred: ClassVar[bool] = True  # False pads LeRobot's images at the top or left only
    images: tuple[str, ...]  # keys in the model's order
    optional_images: tuple[str, ...]  # keys of images that may be missing
    antialias: bool  # True resizes as openpi does, to uint8; False as LeRobot, to float32
    prompt: PromptForm  # format of the prompt
    state_size: int  # numbers in the robot's state
    action_size: int  # numbers in its actions
    state: Normalization  # normalisation of the state
    actions: Normalization  # normalisation of the actions
    delta: tuple[bool, ...] = ()  # True for action dimensions relative to the state; empty if none are
    # True adds the measured state to relative actions (LeRobot); False adds it normalised and un-normalised
    # (openpi).
    raw_state: bool = False
    adapt: bool = False  # True converts ALOHA's joints and grippers
    # Normalises the rest of a previous chunk; None if it is the inverse of ``actions``.
    previous: Normalization | None = None
    summed_times: bool = True  # as for :func:`~vla_ros_models.pi.network.euler_times`

    def prepared_images(self, images: Mapping[str, UInt8Array | RawImage], size: int) -> list[Any]:
        """Return the present images in the model's order; raw images are returned unchanged.

        Other images are resized to [size, size, 3], uint8 or float32 in [0, 1].
        """
        resize: Callable[..., NDArray[Any]] = resize_with_pad
        if not self.antialias:
            resize = partial(resize_with_pad_linear, centred=self.centred)
        present = [images[key] for key in self.images if key in images]
        return [one if isinstance(one, RawImage) else resize(one, (size, size)) for one in present]

    def normalized_state(self, state: Array) -> Array:
        """Normalise the robot's state, float [state_size]."""
        return self.state.normalize(self._robot_state(state))

    def tokens(self, encode: Callable[[str], list[int]], instruction: str, state: Array) -> IntArray:
        """Encode the instruction and the normalised state as tokens, int64 [L]."""
        return prompt_tokens(encode, instruction, self.prompt, state)

    def processor(self, size: tuple[int, int]) -> ImageProcessor:
        return ResizeWithPad(size) if self.antialias else LinearResize(size, centred=self.centred)

    def shown_actions(self, normalized: Array) -> Array:
        """Return normalised actions [H, action_size] as the published code returns them."""
        return normalized[:, : self.action_size]

    def robot_actions(self, normalized: Array, state: Array) -> Array:
        """Convert the model's actions [H, action_dim] to the robot's units, [H, action_size]."""
        actions = self.actions.unnormalize(normalized)
        if self.delta:
            actions = add_state(actions, self._base(state), self.delta)
        actions = actions[..., : self.action_size]
        return aloha_actions(actions) if self.adapt else actions

    def model_actions(self, actions: Array, state: Array) -> Array:
        """Convert the robot's actions [T, action_size] to the model's, as for :meth:`robot_actions`."""
        return (self.previous or self.actions).normalize(self.converted_actions(actions, state))

    def converted_actions(self, actions: Array, state: Array) -> Array:
        """Convert the robot's actions [T, action_size] to the numbers that are normalised."""
        values: Array = np.array(actions, np.float64)
        if self.adapt:
            values = aloha_targets(values)
        return add_state(values, -self._base(state), self.delta) if self.delta else values

    def converted_state(self, state: Array) -> Array:
        """Convert the robot's state [..., state_size] to the numbers that are normalised."""
        return self._robot_state(state)

    def learned(self, layout: str) -> LearnedStatistics:
        """Return the statistics of the state and the actions."""
        actions = (self.previous or self.actions).learned
        return LearnedStatistics(layout, self.state.learned, actions, self.converted_actions, self.converted_state)

    def _base(self, state: Array) -> Array:
        base = self._robot_state(state)
        return base if self.raw_state else self.state.unnormalize(self.state.normalize(base))

    def _robot_state(self, state: Array) -> Array:
        return aloha_state(np.asarray(state, np.float64)) if self.adapt else state


def override(processing: Processing, prompt_state: str = "auto", resize: str = "auto") -> Processing:
    """Apply the settings that no file of a checkpoint states; ``auto`` changes nothing.

    ``prompt_state`` (pi0.5) is ``none``, ``as_is``, or ``padded`` for checkpoints trained with LeRobot before 0.5.
    ``resize`` is ``antialias`` (openpi) or ``linear`` (LeRobot), for checkpoints that were trained with one library
    and saved by the other.
    """
    form, antialias = processing.prompt, processing.antialias
    return replace(
        processing,
        prompt=form if prompt_state == "auto" else replace(form, state=prompt_state),
        antialias=antialias if resize == "auto" else resize == "antialias",
    )
