"""The sizes of GR00T N1.7, from its ``config.json`` and its backbone's, and its tensors; without torch."""

from dataclasses import dataclass
from math import isqrt
from typing import Any

from vla_ros.errors import CheckpointError
from vla_ros_models.checkpoint_files import Fields
from vla_ros_models.engine.shapes import DecoderShape

COSMOS = "nvidia/Cosmos-Reason2-2B"
"""Backbone of the published checkpoints, whose sizes LeRobot has in its code; see :data:`COSMOS_CONFIG`."""

COSMOS_CONFIG = {
    "image_token_id": 151655,
    "text_config": {
        "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 5000000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "vocab_size": 151936,
    },
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_size": 1024, "intermediate_size": 4096,
        "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip


@dataclass(frozen=True)
class VisionShape:
    """Sizes of Qwen3-VL's vision tower."""

    blocks: DecoderShape  # the transformer blocks
    out_width: int  # features of a merged token: the language model's width
    side: int  # learned positions per axis
    deepstack: tuple[int, ...]  # blocks whose output is added to the first layers of the language model, in order
    patch_size: int = 16  # side of a patch in pixels
    merge: int = 2  # patches per axis that form one token
    frames: int = 2  # frames of one patch; an image is repeated

    @property
    def unit(self) -> int:
        """Side of one token in pixels."""
        return self.patch_size * self.merge


@dataclass(frozen=True)
class GrootArchitecture:
    """Sizes of one model."""

    vision: VisionShape
    text: DecoderShape  # the layers of the language model that run
    sections: tuple[int, ...]  # frequencies of M-RoPE for time, height and width, interleaved
    image_token: int  # id that stands for one image token
    connector: DecoderShape | None  # self-attention over the language model's hidden states
    normed: bool  # whether a layer norm precedes the connector
    head: DecoderShape  # the diffusion transformer over state and actions
    interleaved: bool  # True if every second block of the head attends to its own rows, False if none does
    # True if crossing blocks attend to text or to image tokens, False if they attend to all tokens.
    alternate: bool
    text_every: int  # every how many-th crossing block attends to text tokens, the first one included
    hidden: int  # features between the two layers of the encoders and decoders of embodiments
    output: int  # features that the head returns
    action_dim: int  # A, numbers to which actions are padded
    state_dim: int  # numbers to which the state is padded
    horizon: int  # H, actions of one chunk
    embodiments: int  # embodiments that the weights have room for
    positions: int  # learned positions of actions; 0 if there are none
    flow_steps: int  # Euler steps
    time_buckets: int  # the flow time runs from 0 to this number
    ramp_rate: float  # of real-time chunking
    targets: bool = False  # whether a flow step depends on the time at which it ends: a distilled flow

    @property
    def crossing(self) -> tuple[int, ...]:
        """Blocks of the head that attend to the connector's tokens."""
        return tuple(range(0, self.head.layers, 2 if self.interleaved else 1))

    def sees_text(self, block: int) -> bool:
        """Return True if an alternating crossing block attends to text tokens, False if to image tokens."""
        return block % (2 * self.text_every) == 0


IGNORED = {
    "training": "tune_* attn_dropout noise_* state_dropout_prob color_jitter_params random_rotation_angle "
    "extra_augmentation_config backbone_trainable_params_fp32 load_bf16",
    "how it runs, which policy.device and policy.dtype choose": "dtype model_dtype torch_dtype use_flash_attention",
    "stated by processor_config.json, which counts": "formalize_language use_percentiles use_relative_action "
    "use_albumentations_transforms image_crop_size image_target_size shortest_image_edge crop_fraction "
    "letter_box_transform clip_outliers",
    "names and versions": "architectures transformers_version model_type model_revision _name_or_path",
}
"""Keys of NVIDIA's ``config.json`` that do not change the actions, by the reason."""

_TRAINING = {"training": "dropout final_dropout num_embeds_ada_norm compute_dtype max_num_positional_embeddings"}


def read_architecture(config: Fields, backbone: Fields) -> GrootArchitecture:
    """Read the sizes from NVIDIA's ``config.json`` and the backbone's; raises CheckpointError if unsupported."""
    config.advice = "only GR00T N1.7 is supported"
    for key, usual in {
        "backbone_model_type": "qwen", "reproject_vision": False, "exclude_state": False, "use_mean_std": False,
        "apply_sincos_state_encoding": False, "state_history_length": 1,
    }.items():  # fmt: skip
        config.expect(key, usual, None)
    text, sections = _text(backbone.object("text_config"), config.whole("select_layer", 16))
    width = config.whole("backbone_embedding_dim", 2048)
    vision = _vision(backbone.object("vision_config"))
    if not width == text.hidden_size == vision.out_width:
        raise CheckpointError(
            f"{config.where}: backbone_embedding_dim is {width}, but {backbone.where} has a language model "
            f"{text.hidden_size} wide and image tokens of {vision.out_width}; the backbone is another one"
        )
    blocks = config.object("diffusion_model_cfg")
    blocks.expect("norm_type", "ada_norm")
    head = _blocks(blocks, eps=number_or(blocks, "norm_eps", 1e-5))
    if blocks.get("norm_elementwise_affine"):
        raise CheckpointError(f"{blocks.where}: norm_elementwise_affine: found True, expected False")
    if config.whole("input_embedding_dim", 1536) != head.hidden_size:
        raise CheckpointError(
            f"{config.where}: input_embedding_dim is {config['input_embedding_dim']}, but the heads of "
            f"diffusion_model_cfg have {head.hidden_size} features together"
        )
    attention, connector = config.object("vl_self_attention_cfg"), None
    if attention.get("num_layers"):
        connector = _blocks(attention, eps=1e-5)
        attention.finish(_TRAINING)
        if connector.hidden_size != width:
            raise CheckpointError(f"{attention.where}: {connector.hidden_size} features, expected {width}")
    alternate = bool(config.expect("use_alternate_vl_dit", True, False))
    interleaved = bool(blocks.expect("interleave_self_attention", False, True))
    if alternate and not interleaved:
        raise CheckpointError(f"{blocks.where}: interleave_self_attention: found False, expected True")
    found = GrootArchitecture(
        vision=vision,
        text=text,
        sections=sections,
        image_token=backbone.whole("image_token_id", 151655),
        connector=connector,
        normed=bool(config.expect("use_vlln", True, False)),
        head=head,
        interleaved=interleaved,
        alternate=alternate,
        text_every=config.whole("attend_text_every_n_blocks", 2),
        hidden=config.whole("hidden_size", 1024),
        output=blocks.whole("output_dim", 26),
        action_dim=config.whole("max_action_dim", 132),
        state_dim=config.whole("max_state_dim", 132),
        horizon=config.whole("action_horizon", 40),
        embodiments=config.whole("max_num_embodiments", 32),
        positions=config.whole("max_seq_len", 1024) * bool(config.expect("add_pos_embed", True, False)),
        flow_steps=config.whole("num_inference_timesteps", 4),
        time_buckets=config.whole("num_timestep_buckets", 1000),
        ramp_rate=config.number("rtc_ramp_rate", 6.0),
    )
    config.get("model_name")
    blocks.finish(_TRAINING)
    config.finish(IGNORED)
    if found.output != found.hidden:
        raise CheckpointError(
            f"{config.where}: the head returns {found.output} features, but the decoder takes {found.hidden}"
        )
    if 0 < found.positions < found.horizon:
        raise CheckpointError(f"{config.where}: {found.horizon} actions, but {found.positions} positions")
    return found


def number_or(fields: Fields, key: str, default: float) -> float:
    """Read a positive number; ``default`` if it is missing or null."""
    return default if fields.get(key) is None else fields.number(key, default)


def _blocks(fields: Fields, eps: float) -> DecoderShape:
    """Read the description of diffusers' transformer blocks."""
    if (found := fields.get("positional_embeddings", "sinusoidal")) is not None:
        raise CheckpointError(f"{fields.where}: positional_embeddings: found {found!r}, expected null")
    fields.expect("activation_fn", "gelu-approximate")
    fields.expect("attention_bias", True)
    fields.expect("upcast_attention", False)
    heads, size = fields.whole("num_attention_heads", 8), fields.whole("attention_head_dim", 64)
    return DecoderShape(
        heads * size, 4 * heads * size, fields.whole("num_layers", 12), heads, heads, size, eps, norm="layer",
        activation="gelu", gated=False, rotary=False,
    )  # fmt: skip


def _text(fields: Fields, layers: int) -> tuple[DecoderShape, tuple[int, ...]]:
    fields.expect("hidden_act", "silu")
    fields.expect("attention_bias", False)
    stated = fields.whole("num_hidden_layers", None)
    rope = fields.object("rope_parameters" if "rope_parameters" in fields else "rope_scaling")
    rope.expect("rope_type", "default")
    rope.expect("mrope_interleaved", True)
    sections: Any = rope.get("mrope_section", [24, 20, 20])
    theta = rope.number("rope_theta", 0.0) if "rope_theta" in rope else fields.number("rope_theta", 5000000.0)
    width, heads = fields.whole("hidden_size", None), fields.whole("num_attention_heads", None)
    size = fields.whole("head_dim", width // heads)
    valid = isinstance(sections, list) and len(sections) == 3 and all(isinstance(one, int) for one in sections)
    if not valid or sum(sections) != size // 2:
        raise CheckpointError(
            f"{rope.where}: mrope_section is {sections!r}, expected three that add up to {size // 2}"
        )
    shape = DecoderShape(
        width, fields.whole("intermediate_size", None), min(layers, stated), heads,
        fields.whole("num_key_value_heads", heads), size, fields.number("rms_norm_eps", 1e-6), theta,
        vocab_size=fields.whole("vocab_size", None),
    )  # fmt: skip
    return shape, tuple(sections)


def _vision(fields: Fields) -> VisionShape:
    fields.expect("hidden_act", "gelu_pytorch_tanh")
    fields.expect("in_channels", 3)
    width, heads, depth = (fields.whole(key, None) for key in ("hidden_size", "num_heads", "depth"))
    positions, levels = fields.whole("num_position_embeddings", None), fields.get("deepstack_visual_indexes", [])
    known = isinstance(levels, list) and all(isinstance(one, int) and 0 <= one < depth for one in levels)
    if not known or isqrt(positions) ** 2 != positions:
        raise CheckpointError(
            f"{fields.where}: found deepstack_visual_indexes {levels!r} and num_position_embeddings {positions}, "
            f"expected indices below {depth} and a square number"
        )
    blocks = DecoderShape(
        width, fields.whole("intermediate_size", None), depth, heads, heads, width // heads, 1e-6, norm="layer",
        activation="gelu", gated=False,
    )  # fmt: skip
    return VisionShape(
        blocks, fields.whole("out_hidden_size", None), isqrt(positions), tuple(levels),
        fields.whole("patch_size", None), fields.whole("spatial_merge_size", None),
        fields.whole("temporal_patch_size", None),
    )  # fmt: skip


VISION = "backbone.model.model.visual."
LANGUAGE = "backbone.model.model.language_model."
HEAD = "action_head."
EMBEDDINGS = (f"{LANGUAGE}embed_tokens.weight", "backbone.model.lm_head.weight")
"""Two names of one tied tensor; LeRobot's files have only the second."""
