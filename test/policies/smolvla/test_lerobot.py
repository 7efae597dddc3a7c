"""Random models of many configurations, answered by LeRobot 0.6.1 itself where it is installed (see ``.ci``)."""

import json
import os
import shutil
from dataclasses import dataclass, field

import numpy as np
import pytest

pytest.importorskip("lerobot", reason="needs an environment with LeRobot")

import torch
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

from test.policies.smolvla.conftest import SHIPPED, infer, load_folder

CHUNK = 1e-4
PROMPTS = (
    "", "\n", "pick up the red cube", "Öffne die 2. Schublade_links, dann 73 cm vor\n", "把红色方块放进盒子里 🤖",
    "put  the cube\tinto the bowl " * 17, "x" * 500, "Stack 12345 blocks; don't touch #3 (the blue one)!",
)  # fmt: skip
SIZES = ((1, 1), (480, 640), (37, 211), (2160, 3840), (128, 128), (720, 1280), (64, 64), (3, 2), (1080, 1920))

SMALL = {"num_vlm_layers": 4, "chunk_size": 10, "n_action_steps": 10, "resize_imgs_with_padding": (128, 128)}


@dataclass(frozen=True)
class Variant:
    """What differs from a small SmolVLA."""

    config: dict = field(default_factory=dict)  # of SmolVLAConfig
    text: dict = field(default_factory=dict)  # of the language model
    vision: dict = field(default_factory=dict)  # of the vision tower
    shuffle: int = 4
    cameras: int = 2
    state: int = 6
    action: int = 6
    missing: tuple[int, ...] = ()  # cameras that the second observation lacks
    norms: tuple[str, str] = ("MEAN_STD", "MEAN_STD")  # of state and action
    tokenizer: dict = field(default_factory=dict)  # of tokenizer_config.json


VARIANTS = {
    "one layer": Variant({"num_vlm_layers": 1}),
    "all layers": Variant({"num_vlm_layers": -1}),
    "more layers than there are": Variant({"num_vlm_layers": 99}),
    "every layer attends to itself": Variant({"self_attn_every_n_layers": 1}),
    "every third": Variant({"num_vlm_layers": 6, "self_attn_every_n_layers": 3}),
    "half the expert": Variant({"num_expert_layers": 2, "self_attn_every_n_layers": -1}),
    "third of the expert": Variant({"num_vlm_layers": 6, "num_expert_layers": 2, "self_attn_every_n_layers": 0}),
    "no crossing": Variant({"attention_mode": "self_attn", "num_vlm_layers": 3}),
    "wide expert": Variant({"expert_width_multiplier": 1.25}),
    "narrow expert": Variant({"expert_width_multiplier": 0.25, "chunk_size": 3, "n_action_steps": 2}),
    "heads wider than the model": Variant(
        text={"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    ),
    "one key head": Variant(text={"num_key_value_heads": 1, "intermediate_size": 40, "rms_norm_eps": 1e-3}),
    "as many key heads": Variant(text={"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "three cameras, one empty": Variant({"empty_cameras": 1}, cameras=3, missing=(1,)),
    "special tokens": Variant({"add_image_special_tokens": True}, cameras=1),
    "special tokens, cameras missing": Variant(
        {"add_image_special_tokens": True, "empty_cameras": 2, "prefix_length": 120}, cameras=4, missing=(0, 2)
    ),
    "four cameras": Variant({"pad_language_to": "max_length", "tokenizer_max_length": 16}, cameras=4, missing=(3,)),
    "large images": Variant({"resize_imgs_with_padding": (256, 256)}, vision={"num_hidden_layers": 3}),
    "small images": Variant({"resize_imgs_with_padding": (96, 96)}, shuffle=2, vision={"num_attention_heads": 4}),
    "other patches": Variant(
        {"resize_imgs_with_padding": (120, 120)}, vision={"patch_size": 10, "image_size": 130}, shuffle=3
    ),
    "one step, one number": Variant({"num_steps": 1, "min_period": 0.01, "max_period": 2.5}, state=1, action=1),
    "seven steps, many numbers": Variant(
        {"num_steps": 7, "max_state_dim": 40, "max_action_dim": 24, "chunk_size": 61, "n_action_steps": 61},
        state=40, action=24,
    ),
    "aloha": Variant({"adapt_to_pi_aloha": True}, cameras=1, state=14, action=14),
    "quantiles": Variant(norms=("QUANTILES", "MIN_MAX")),
    "deciles, plain actions": Variant(norms=("QUANTILE10", "IDENTITY"), tokenizer={"truncation_side": "left"}),
    "plain state": Variant({"tokenizer_max_length": 5}, norms=("IDENTITY", "MEAN_STD")),
}  # fmt: skip


def make(folder, variant, draw):
    """Write a random model as LeRobot saves one; return its policy and processors."""
    shutil.copytree(SHIPPED / "vlm", folder / "vlm")
    base = json.loads((folder / "vlm" / "config.json").read_text())
    base["text_config"] |= variant.text
    base["vision_config"] |= variant.vision
    base["scale_factor"] = variant.shuffle
    (folder / "vlm" / "config.json").write_text(json.dumps(base))
    path = folder / "vlm" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | variant.tokenizer))
    inputs = {
        f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, 96, 128))
        for name in ("wrist", "front", "left", "a.b")[: variant.cameras]
    }
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (variant.state,))
    state, action = (NormalizationMode[name] for name in variant.norms)
    config = SmolVLAConfig(
        input_features=inputs, output_features={"action": PolicyFeature(FeatureType.ACTION, (variant.action,))},
        normalization_mapping={"VISUAL": NormalizationMode.IDENTITY, "STATE": state, "ACTION": action},
        vlm_model_name="vlm", device="cpu",
        **(SMALL | variant.config),
    )  # fmt: skip
    statistics = {
        name: ranges(draw, size)
        for name, size in (("observation.state", variant.state), ("action", variant.action))
    }
    policy = SmolVLAPolicy(config).float().eval()
    generator = torch.Generator().manual_seed(int(draw.integers(1 << 30)))
    with torch.no_grad():
        for name, value in policy.named_parameters():
            value.normal_(0, 0.2 if value.ndim < 2 else value[0].numel() ** -0.5, generator=generator)
            if "norm" in name and name.endswith("weight"):
                value += 1.0
    before, after = make_pre_post_processors(config, dataset_stats=statistics)
    for one in (policy, before, after):
        one.save_pretrained(folder)
    return policy, before, after


def ranges(draw, size):
    """Statistics of ``size`` numbers, or of an array of that shape."""
    numbers = np.sort(draw.normal(size=(6, *np.atleast_1d(size))), axis=0)
    names = ("min", "q01", "q10", "q90", "q99", "max")
    found = dict(zip(names, numbers, strict=True)) | {
        "mean": draw.normal(size=size),
        "std": draw.uniform(0.1, 2, size),
    }
    return {name: torch.tensor(value, dtype=torch.float32) for name, value in found.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_chunks_equal_lerobots(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)  # the base model's name is relative
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    variant, number = VARIANTS[name], list(VARIANTS).index(name)
    draw = np.random.default_rng(number)
    policy, before, after = make(tmp_path, variant, draw)
    config, model = policy.config, load_folder(tmp_path)
    for turn in range(3):
        images = {
            f"observation.images.{key}": draw.integers(
                0, 256, (*SIZES[(number + 2 * turn + at) % len(SIZES)], 3), dtype=np.uint8
            )
            for at, key in enumerate(("wrist", "front", "left", "a.b")[: variant.cameras])
            if turn != 1 or at not in variant.missing
        }
        prompt = PROMPTS[(number + turn) % len(PROMPTS)]
        state = draw.normal(size=variant.state).astype(np.float32)
        noise = draw.normal(size=(config.chunk_size, config.max_action_dim)).astype(np.float32)
        batch = {key: torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255 for key, image in images.items()}
        batch |= {"observation.state": torch.from_numpy(state)[None], "task": [prompt]}
        prepared = before(batch)
        mask = prepared["observation.language.attention_mask"][0].bool()
        tokens = prepared["observation.language.tokens"][0][mask].tolist()
        with torch.no_grad():
            chunk = policy.predict_action_chunk(prepared, noise=torch.from_numpy(noise)[None])
            actions = after(chunk.clone())[0].numpy()
        asked = model.request(images, state, prompt, noise)
        assert asked.tokens[:-1][len(asked.tokens) - 1 - len(tokens) :].tolist() == tokens
        [ours] = infer(model, asked)
        np.testing.assert_allclose(ours, chunk[0].numpy(), rtol=0, atol=CHUNK)
        np.testing.assert_allclose(
            model.processing.robot_actions(model.engine.answer([asked])[0].actions, state),
            actions,
            rtol=0,
            atol=2 * CHUNK,
        )
    model.engine.close()
