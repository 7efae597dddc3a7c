"""Adapters as LeRobot saves them, answered by LeRobot 0.6.1 and peft where they are installed (see ``.ci``).

``RECORD_ADAPTERS=1`` writes the adapters and the answers to ``test/data/adapters``.
"""

import contextlib
import io
import os
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("lerobot", reason="needs an environment with LeRobot")

import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from peft import LoraConfig

from test.policies.adapter_cases import CASES, DATA, base_of, check, observation_of
from test.policies.pi.real_lerobot import older, tiny

LINEAR = r".*\.(language_model|vision_model|visual|layers|blocks)\..*\.(q_proj|v_proj|to_q|to_k|fc1|qkv|gate_proj)"
SETTINGS = {
    "pi05": {"r": 4, "lora_alpha": 8},  # on LeRobot's own targets
    "pi0": {"r": 3, "use_dora": True, "use_rslora": True, "target_modules": rf"{LINEAR}|model\.action_in_proj",
            "modules_to_save": ["action_out_proj"]},
    "smolvla": {"r": 4, "lora_alpha": 6, "target_modules": rf"{LINEAR}|.*\.embed_tokens|model\.action_in_proj",
                "rank_pattern": {r"layers\.0\..*": 2}, "alpha_pattern": {"v_proj": 9},
                "modules_to_save": ["state_proj"]},
    "groot": {"r": 2, "lora_alpha": 2, "target_modules": LINEAR, "lora_bias": False,
              "modules_to_save": ["action_decoder"]},
}  # fmt: skip


def train(policy):
    """Give every trainable parameter other numbers, of the size that training leaves."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            if "magnitude" in name or "modules_to_save" in name:
                parameter.data.mul_(1 + 0.1 * noise)
            else:
                parameter.data.copy_(0.1 * noise)


def actions(policy, before, after, name):
    """LeRobot's actions [H, D] for a recorded observation."""
    images, state, prompt, noise = observation_of(name)
    batch = {
        key: torch.from_numpy(np.array(one)).permute(2, 0, 1)[None].float() / 255 for key, one in images.items()
    }
    batch |= {"observation.state": torch.from_numpy(state)[None], "task": [prompt]}
    policy.reset()
    with torch.no_grad():
        if name == "groot":
            torch.manual_seed(int(noise))
            return np.asarray(after(policy.predict_action_chunk(before(batch)))[0], np.float32)
        chunk = policy.predict_action_chunk(before(batch), noise=torch.from_numpy(noise)[None])
        return np.asarray(after(chunk)[0], np.float32)


def make(name, output, scratch):
    """Write the adapter ``name`` to ``output`` as lerobot-train does; return the base and LeRobot's answers."""
    base = base_of(name, scratch)
    if name.startswith("pi"):
        older(base)
    at = Path.cwd()
    os.chdir(base)
    try:
        config = PreTrainedConfig.from_pretrained(base)
        config.pretrained_path = Path(base)
        with contextlib.redirect_stdout(io.StringIO()), tiny():
            policy = get_policy_class(config.type).from_pretrained(base, config=config)
        before, after = make_pre_post_processors(config, str(base))
        plain = actions(policy, before, after, name)
        settings = SETTINGS[name]
        if "target_modules" in settings:
            policy = policy.wrap_with_peft(LoraConfig(**settings))
        else:
            policy = policy.wrap_with_peft(peft_cli_overrides={"method_type": "LORA", **settings})
        train(policy)
        policy.eval()
        adapted = actions(policy, before, after, name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft says that it saves the embedding, too
            policy.save_pretrained(output)
        policy.config.save_pretrained(output)
        before.save_pretrained(output)
        after.save_pretrained(output)
        merged = policy.merge_and_unload()
        answers = {"plain": plain, "adapted": adapted, "merged": actions(merged, before, after, name)}
        for key, one in merged.state_dict().items():
            answers[f"weight.{key}"] = one.float().numpy().ravel()[:: max(1, one.numel() // 64)]
    finally:
        os.chdir(at)
    return base, answers


@pytest.mark.parametrize("name", CASES)
def test_actions_equal_lerobots(tmp_path, monkeypatch, name):
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    base, answers = make(name, tmp_path / "adapter", tmp_path)
    check(name, tmp_path / "adapter", base, answers)
    if "RECORD_ADAPTERS" in os.environ:
        record(name, tmp_path / "adapter", base, answers)


def record(name, adapter, base, answers):
    shutil.rmtree(DATA / name, ignore_errors=True)
    shutil.copytree(adapter, DATA / name, ignore=shutil.ignore_patterns("README.md"))
    for path in (DATA / name).glob("*.json"):  # the base is no folder elsewhere
        path.write_text(re.sub(r"[^\"]*" + re.escape(str(base)), "lerobot/base", path.read_text()))
    np.savez_compressed(DATA / f"{name}.npz", **answers)
