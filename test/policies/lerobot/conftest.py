"""Checkpoints of random weights, small enough to build in seconds, written by LeRobot itself."""

import dataclasses
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

FRONT, STATE, ENVIRONMENT = "observation.images.front", "observation.state", "observation.environment_state"
SIZE = (64, 96)
JOINTS = 7
_WORDS = ("lift", "the", "cube", "Task", "State", "Action", ":", ",", ";", ".")
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_TEXT = {**_VISION, "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 2}
_CHUNK = {"chunk_size": 10, "n_action_steps": 10}
_PI = {**_CHUNK, "num_inference_steps": 2, "tokenizer_max_length": 64, "image_resolution": (28, 28)}
_FLORENCE = {
    "vision_config": {
        "depths": [1, 1, 1, 1],
        "embed_dim": [16, 16, 16, 16],
        "num_heads": [2, 2, 2, 2],
        "num_groups": [2, 2, 2, 2],
        "projection_dim": 32,
        "window_size": 4,
    },
    "text_config": {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "vocab_size": 64,
    },
}
FAMILIES: dict[str, dict[str, Any]] = {
    "act": {
        "dim_model": 32,
        "n_heads": 2,
        "dim_feedforward": 64,
        "n_encoder_layers": 1,
        "latent_dim": 8,
        **_CHUNK,
        "pretrained_backbone_weights": None,
    },
    "diffusion": {
        "down_dims": (32, 64),
        "n_groups": 4,
        "horizon": 16,
        "n_action_steps": 8,
        "num_inference_steps": 3,
        "pretrained_backbone_weights": None,
    },
    "smolvla": {
        **_CHUNK,
        "num_steps": 2,
        "num_vlm_layers": 2,
        "resize_imgs_with_padding": (64, 64),
        "expert_width_multiplier": 0.5,
    },
    "pi0": _PI,
    "pi05": _PI,
    "xvla": {
        **_CHUNK,
        "num_denoising_steps": 2,
        "florence_config": _FLORENCE,
        "hidden_size": 32,
        "depth": 1,
        "num_heads": 2,
        "max_len_seq": 128,
        "resize_imgs_with_padding": (64, 64),
    },
}


_NAMES_TOKENIZER = {"smolvla": "vlm_model_name", "xvla": "tokenizer_name"}


def write_tokenizer(folder: Path) -> Any:
    """Write a tokenizer of a few words as transformers does."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    named = {  # SmolVLA reads these attributes
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    }
    words = ["<pad>", "<unk>", "<s>", *named.values(), *_WORDS]
    words += list(map(str, range(10)))
    text = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    text.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    written = PreTrainedTokenizerFast(
        tokenizer_object=text, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", extra_special_tokens=named
    )
    written.save_pretrained(folder)
    return written


def write_backbone(folder: Path) -> None:
    """Write what SmolVLA reads of its vision-language model: configuration and processor, no weights."""
    from transformers import SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    text = {**_TEXT, "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "num_key_value_heads": 2}
    text |= {"num_attention_heads": 4}
    vision = {**_VISION, "image_size": 64, "patch_size": 16}
    SmolVLMConfig(text_config=text, vision_config=vision, scale_factor=2).save_pretrained(folder)
    tokenizer = write_tokenizer(folder)
    SmolVLMProcessor(SmolVLMImageProcessor(), tokenizer, SmolVLMVideoProcessor(), image_seq_len=4).save_pretrained(
        folder
    )


PI0_FAST = {**_CHUNK, "max_decoding_steps": 24, "fast_skip_tokens": 4, "validate_action_token_prefix": False}
"""Options of pi0-FAST, whose tokens are random and so do not begin as trained ones do."""


def write_fast_tokenizers(words: Path, actions: Path) -> None:
    """Write a tokenizer with as many words as PaliGemma's, and an action tokenizer fitted to random chunks."""
    from lerobot.policies.molmoact2.molmoact2_hf_model.action_tokenizer import UniversalActionProcessor
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ["<pad>", "<unk>", "<s>", "</s>", "|", *_WORDS, *map(str, range(10))]
    known += [f"w{number}" for number in range(257152 - len(known))]
    text = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, "<unk>"))
    text.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=text, **named).save_pretrained(words)
    chunks = np.random.default_rng(0).normal(size=(50, 10, JOINTS))
    fitted = UniversalActionProcessor.fit(list(chunks), time_horizon=10, action_dim=JOINTS)
    fitted.tokenizer.save_pretrained(actions)
    about = {"processor_class": "Fast", "auto_map": {"AutoProcessor": "fast.Fast"}, "min_token": fitted.min_token}
    (actions / "processor_config.json").write_text(json.dumps({**about, "action_dim": JOINTS, "time_horizon": 10}))
    base = f"from {UniversalActionProcessor.__module__} import UniversalActionProcessor as Base\n"
    (actions / "fast.py").write_text(base + "class Fast(Base):\n    pass\n")


MOLMOACT2 = {**_CHUNK, "action_mode": "continuous", "normalize_gripper": True}
MOLMOACT2 |= {"inference_action_mode": "continuous", "enable_inference_cuda_graph": False}
MOLMOACT2 |= {"model_dtype": "float32", "dtype": "float32", "train_mode_vlm": "freeze"}
"""Options of MolmoAct2, in LeRobot 0.6.1 the first of the last line, in its main branch the others."""


def write_molmoact2(folder: Path) -> dict[str, Any]:
    """Write the checkpoint from which LeRobot builds MolmoAct2; return the options that this LeRobot knows."""
    import torch
    from lerobot.policies.molmoact2.configuration_molmoact2 import MolmoAct2Config as Policy
    from lerobot.policies.molmoact2.molmoact2_hf_model.configuration_molmoact2 import MolmoAct2Config
    from lerobot.policies.molmoact2.molmoact2_hf_model.modeling_molmoact2 import MolmoAct2ForConditionalGeneration
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    parts = ("image", "low_res_image", "frame", "action", "state")
    framed = [f"{part}_{side}" for part in parts for side in ("start", "end")]
    framed.remove("low_res_image_end")
    numbers = {f"{name}_token_id": name.replace("image", "im") for name in (*framed, "action_output")}
    numbers |= {"image_low_res_id": "im_low", "image_col_id": "im_col", "image_patch_id": "im_patch"}
    numbers["state_token_start_id"] = "state_0"
    named = [*numbers.values(), *(f"state_{number}" for number in range(1, 256))]
    named += ["|image|", "|im_start|", "|im_end|", "setup_start", "setup_end", "control_start", "control_end"]
    end = "<|endoftext|>"
    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    text = Qwen2Tokenizer(vocab=letters, merges=[], bos_token=end, eos_token=end, pad_token=end, unk_token=end)
    text.add_tokens([f"<{name}>" for name in named], special_tokens=True)
    text.save_pretrained(folder)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    vision = {**_VISION, **heads, "num_hidden_layers": 2, "image_default_input_size": (56, 56), "image_num_pos": 16}
    torch.manual_seed(0)
    model = MolmoAct2ForConditionalGeneration(
        MolmoAct2Config(
            vision,
            {**_VISION, **heads, "vit_layers": (-1, -2), "text_hidden_size": 32},
            {**_TEXT, **heads, "vocab_size": len(text) + 1, "additional_vocab_size": 8, "use_qk_norm": True},
            {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "ffn_multiple_of": 16, "timestep_embed_dim": 16},
            **{key: text.convert_tokens_to_ids(f"<{name}>") for key, name in numbers.items()},
            num_state_tokens=256,
            max_action_horizon=10,
            flow_matching_num_steps=2,
            action_mode="continuous",
        )
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.1)
    model.save_pretrained(folder)
    crop = {"size": {"height": 56, "width": 56}, "max_crops": 1, "crop_mode": "resize"}
    processor = {"image_processor": crop, "video_processor": {}, "image_use_col_tokens": False}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    known = {field.name for field in dataclasses.fields(Policy)}
    return {key: value for key, value in MOLMOACT2.items() if key in known} | {"checkpoint_path": str(folder)}


@pytest.fixture(scope="module", autouse=True)
def small_gemma() -> Iterator[None]:
    """Replaces LeRobot's fixed size of PaliGemma, which has billions of parameters."""
    from lerobot.policies.pi0 import modeling_pi0
    from lerobot.policies.pi0_fast import modeling_pi0_fast
    from lerobot.policies.pi05 import modeling_pi05
    from transformers import SiglipVisionConfig

    with pytest.MonkeyPatch.context() as patched:
        width = property(lambda self: 32, lambda self, value: None)  # LeRobot sets it to 2048
        patched.setattr(SiglipVisionConfig, "projection_dim", width, raising=False)
        for module in (modeling_pi0, modeling_pi05, modeling_pi0_fast):
            gemma = module.GemmaConfig(width=32, depth=2, mlp_dim=64, num_heads=2, num_kv_heads=1, head_dim=16)
            make = module.CONFIG_MAPPING["paligemma"]
            small = partial(make, vision_config=SiglipVisionConfig(**_VISION, patch_size=14))
            patched.setattr(module, "get_gemma_config", lambda variant, gemma=gemma: gemma)
            patched.setattr(module, "CONFIG_MAPPING", {"paligemma": small, "gemma": module.CONFIG_MAPPING["gemma"]})
        yield


def statistics() -> dict[str, dict[str, Any]]:
    """Statistics of a data set."""
    import torch

    middle = torch.randn(JOINTS)
    numbers = {"mean": middle, "std": torch.full((JOINTS,), 0.5), "min": middle - 2, "max": middle + 2}
    numbers |= {"q01": middle - 1.5, "q99": middle + 1.5}
    colour = {"mean": 0.4, "std": 0.3, "min": 0.0, "max": 1.0}
    image = {name: torch.full((3, 1, 1), value) for name, value in colour.items()}
    return {STATE: numbers, ENVIRONMENT: numbers, "action": numbers, FRONT: image}


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tokenizer, and of SmolVLA's backbone."""
    folder = tmp_path_factory.mktemp("words")
    write_backbone(folder)
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def folder(
    request: pytest.FixtureRequest, words: Path, small_gemma: None, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A checkpoint in a folder with the name of its family."""
    return write(request.param, words, tmp_path_factory.mktemp("lerobot") / request.param)


def write(kind: str, words: Path, where: Path, image: bool = True, **more: Any) -> Path:
    """Write a checkpoint with ``more`` options; without an image it takes the state of the environment."""
    import torch
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    inputs = {
        FRONT if image else ENVIRONMENT: (
            PolicyFeature(FeatureType.VISUAL, (3, *SIZE)) if image else PolicyFeature(FeatureType.ENV, (JOINTS,))
        ),
        STATE: PolicyFeature(FeatureType.STATE, (JOINTS,)),
    }
    outputs = {"action": PolicyFeature(FeatureType.ACTION, (JOINTS,))}
    options = FAMILIES.get(kind, {}) | more
    if kind in _NAMES_TOKENIZER:
        options[_NAMES_TOKENIZER[kind]] = str(words)
    config = make_policy_config(kind, input_features=inputs, output_features=outputs, device="cpu", **options)
    policy = get_policy_class(kind)(config)
    with patch("lerobot.processor.tokenizer_processor.AutoTokenizer") as hub:  # pi's code names one on the hub
        hub.from_pretrained = lambda *_, **__: PreTrainedTokenizerFast.from_pretrained(words)
        before, after = make_pre_post_processors(config, dataset_stats=statistics())
    for written in (policy, before, after):
        written.save_pretrained(where)
    return where
