"""The sizes of SmolVLA, from ``config.json`` and that of its base model, SmolVLM2; without torch."""

from dataclasses import dataclass, replace

from vla_ros.errors import CheckpointError
from vla_ros_models.checkpoint_files import Fields
from vla_ros_models.engine.shapes import DecoderShape, TowerShape
from vla_ros_models.pi.architecture import PiArchitecture

SMOLVLM2 = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
"""Base model of the published checkpoints."""

SMOLVLM2_CONFIG = {
    "scale_factor": 4,
    "text_config": {
        "head_dim": 64, "hidden_size": 960, "intermediate_size": 2560, "num_attention_heads": 15,
        "num_hidden_layers": 32, "num_key_value_heads": 5, "rms_norm_eps": 1e-5, "vocab_size": 49280,
    },
    "vision_config": {
        "hidden_size": 768, "image_size": 512, "intermediate_size": 3072, "num_attention_heads": 12,
        "num_hidden_layers": 12, "patch_size": 16,
    },
}  # fmt: skip


@dataclass(frozen=True)
class SmolVlaArchitecture(PiArchitecture):
    """Sizes of one model; ``prefix`` has only the layers that the expert reads."""

    stored_image: int = 512  # side in pixels of the images for which the checkpoint has positions
    shuffle: int = 4  # patches per axis that form one token
    state_dim: int = 32  # numbers to which the state is padded
    reads: tuple[int, ...] = ()  # the prefix's layer that each layer of the expert reads
    special_tokens: bool = False  # True if two control tokens precede each image's tokens and one follows
    projector_bias: bool = False  # True with the shifts of a viewpoint adapter: published projectors have no bias

    @property
    def image_tokens(self) -> int:
        """Tokens of one image, control tokens included."""
        return self.vision.patches // self.shuffle**2 + 3 * self.special_tokens


def read_architecture(config: Fields, base: Fields) -> SmolVlaArchitecture:
    """Read the sizes from ``config.json`` and the base model's; raises CheckpointError if unsupported."""
    text, vision, shuffle = base.object("text_config"), base.object("vision_config"), base.whole("scale_factor", 2)
    for key, usual in {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}.items():
        text.expect(key, usual)
    width, heads = text.whole("hidden_size", None), text.whole("num_attention_heads", None)
    stated, wanted = text.whole("num_hidden_layers", 32), config.whole("num_vlm_layers", 16, least=-1)
    layers = min(wanted, stated) if wanted > 0 else stated
    # Rotary embeddings have LeRobot's base, 10000, whatever the base model's is.
    prefix = DecoderShape(
        width, text.whole("intermediate_size", None), layers, heads, text.whole("num_key_value_heads", heads),
        text.whole("head_dim", width // heads), text.number("rms_norm_eps", 1e-6), norm="rms_float32",
        vocab_size=text.whole("vocab_size", None),
    )  # fmt: skip
    reads, crossing = _layers(config, layers)
    expert_width = int(width * config.number("expert_width_multiplier", 0.75))
    if expert_width < 2 or expert_width % 2:
        raise CheckpointError(
            f"{config.where}: expert_width_multiplier: {config['expert_width_multiplier']!r} of {width} makes "
            f"{expert_width} features, expected an even number"
        )
    hidden = 4 * int(2 * expert_width / 3)
    expert = replace(
        prefix, hidden_size=expert_width, intermediate_size=256 * -(-hidden // 256), layers=len(reads), vocab_size=0
    )
    tower = _tower(vision)
    return SmolVlaArchitecture(
        model="smolvla",
        vision=replace(tower, image_size=_image_size(config, tower.patch_size * shuffle)),
        prefix=replace(prefix, layers=1 + max(reads)),
        expert=expert,
        vocabulary=prefix.vocab_size,
        action_dim=config.whole("max_action_dim", 32),
        horizon=config.whole("chunk_size", 50),
        periods=(config.number("min_period", 4e-3), config.number("max_period", 4.0)),
        stored_image=tower.image_size,
        shuffle=shuffle,
        state_dim=config.whole("max_state_dim", 32),
        reads=reads,
        crossing=crossing,
        special_tokens=bool(config.expect("add_image_special_tokens", False, True)),
    )


def _layers(config: Fields, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the prefix's layer that each layer of the expert reads, and the expert's crossing layers."""
    count = config.whole("num_expert_layers", -1, least=-1)
    count = count if count > 0 else layers
    every = config.whole("self_attn_every_n_layers", 2, least=-1)
    crosses = config.expect("attention_mode", "cross_attn", "self_attn") == "cross_attn"
    if layers % count:
        raise CheckpointError(f"{config.where}: num_expert_layers is {count}, expected a divisor of {layers}")
    reads = tuple(range(0, layers, layers // count))

    def crossing(layer: int) -> bool:
        return crosses and not (every > 0 and layer % every == 0)

    # LeRobot builds the expert by its own layers' numbers, and runs it by those of the language model.
    unlike = [index for index, layer in enumerate(reads) if crossing(index) != crossing(layer)]
    absent = [layer for layer in range(layers) if layer not in reads and not crossing(layer)]
    if unlike or absent:
        raise CheckpointError(
            f"{config.where}: num_expert_layers: {count} of {layers} with attention_mode "
            f"{config.get('attention_mode')!r} and self_attn_every_n_layers {every} does not run in LeRobot "
            "either; expected as many layers, or self_attn_every_n_layers -1 with cross_attn"
        )
    return reads, tuple(index for index, layer in enumerate(reads) if crossing(layer))


def _tower(vision: Fields) -> TowerShape:
    vision.expect("hidden_act", "gelu_pytorch_tanh")
    vision.expect("layer_norm_eps", 1e-6)
    vision.expect("num_channels", 3)
    blocks, width = vision.whole("num_hidden_layers", 12), vision.whole("hidden_size", 1152)
    heads, patch = vision.whole("num_attention_heads", 16), vision.whole("patch_size", 32)
    side, hidden = vision.whole("image_size", 224), vision.whole("intermediate_size", 3072)
    if width % heads or side % patch:
        raise CheckpointError(
            f"{vision.where}: {heads} heads for {width} features and patches of {patch} for images of {side} pixels"
        )
    return TowerShape(width, blocks, heads, hidden, blocks, patch, side)


def _image_size(config: Fields, unit: int) -> int:
    """Return the side of the resized images, which the pixel shuffle needs to be square."""
    size = config.get("resize_imgs_with_padding", [512, 512])
    square = isinstance(size, list) and len(size) == 2 and all(type(side) is int and side > 0 for side in size)
    if not square or size[0] != size[1] or size[0] % unit:
        raise CheckpointError(
            f"{config.where}: resize_imgs_with_padding: found {size!r}, expected two equal multiples of {unit}"
        )
    return int(size[0])
