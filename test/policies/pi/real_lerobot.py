"""Runs tiny pi folders with LeRobot's own code, in an environment with lerobot 0.6.1 or its main branch."""

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.policies.pi0 import modeling_pi0
from lerobot.policies.pi05 import modeling_pi05

from .conftest import DATA

SIZES = json.loads((DATA / "architecture.json").read_text())
NEWER = ("use_visual_memory", "use_proprioceptive_memory", "memory_", "rtc_training_max_delay")
"""Keys of lerobot 0.6.2, with which the folders were written and which 0.6.1 refuses."""


@contextlib.contextmanager
def tiny() -> Iterator[None]:
    """Replaces the sizes that LeRobot fixes."""
    with contextlib.ExitStack() as stack:
        for module in (modeling_pi0, modeling_pi05):

            def sizes(variant: str, module: Any = module) -> Any:
                one = SIZES["gemma" if variant == "gemma_2b" else "expert"]
                heads = (one["heads"], one["kv_heads"], one["head_dim"])
                return module.GemmaConfig(one["width"], one["depth"], one["mlp"], *heads)

            def model(config: Any, real: Any = module.PaliGemmaForConditionalGenerationWithPiGemma) -> Any:
                vision, own = config.vision_config, SIZES["vision"]
                vision.hidden_size, vision.num_hidden_layers = own["width"], own["depth"]
                vision.intermediate_size, vision.num_attention_heads = own["mlp"], own["heads"]
                vision.patch_size, vision.projection_dim = SIZES["patch"], SIZES["gemma"]["width"]
                config.text_config.vocab_size = config.image_token_id = SIZES["vocabulary"]
                return real(config=config)

            def expert(config: Any, real: Any = module.PiGemmaForCausalLM) -> Any:
                config.vocab_size = SIZES["vocabulary"]
                return real(config=config)

            stack.enter_context(patch.object(module, "get_gemma_config", sizes))
            stack.enter_context(patch.object(module, "PaliGemmaForConditionalGenerationWithPiGemma", model))
            stack.enter_context(patch.object(module, "PiGemmaForCausalLM", expert))
        yield


def older(folder: Path) -> None:
    """Adds what only transformers reads, and removes keys that LeRobot 0.6.1 does not know, which are off."""
    tokens = {"tokenizer_class": "GemmaTokenizer", "pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    tokens["mask_token"] = None  # transformers would add one, and LeRobot's main branch saves the tokenizer
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(tokens))
    path = folder / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in content.items() if not key.startswith(NEWER)}))


def answer(folder: Path, case: Any) -> np.ndarray:
    """Return LeRobot's actions [H, D] for the inputs of a recorded case."""
    before_folder = Path.cwd()
    os.chdir(folder)  # the tokenizer's name is relative
    try:
        config = PreTrainedConfig.from_pretrained(folder)
        assert config.dtype == "float32"
        made = get_policy_class(config.type)
        with contextlib.redirect_stdout(io.StringIO()) as said, tiny():
            policy = made.from_pretrained(folder, config=config)
        if "All keys loaded successfully" not in said.getvalue():
            raise ValueError(said.getvalue()[-200:])
        before, after = make_pre_post_processors(config, str(folder))
        batch: dict[str, Any] = {
            name: torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255
            for name, image in case.images.items()
        }
        batch["observation.state"] = torch.from_numpy(case["state"])[None]
        batch["task"] = [case.text("prompt")]
        with torch.no_grad():
            noise = torch.from_numpy(case["noise"])[None]
            chunk = policy.predict_action_chunk(before(batch), noise=noise)
            return np.asarray(after(chunk)[0], np.float32)
    finally:
        os.chdir(before_folder)
