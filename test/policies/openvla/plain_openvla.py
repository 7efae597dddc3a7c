"""OpenVLA written down once more, plainly: float64, no cache, no shared code with the package.

Every token is answered by running the whole sequence again. Slow, and meant to be read beside the paper.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file

SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


def wide(values):
    return torch.tensor(list(values), dtype=torch.float64)


def softmax(scores):
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


def gelu(x):
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def layer_norm(x, weight, bias):
    centered = x - x.mean(-1, keepdim=True)
    return centered / torch.sqrt((centered**2).mean(-1, keepdim=True) + 1e-6) * weight + bias


class PlainOpenVLA:
    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        self.w = {}
        for file in set(index.values()):
            self.w.update({key: value.double() for key, value in load_file(folder / file).items()})

    def tower(self, name, shape, image):
        w = {key.removeprefix(name): value for key, value in self.w.items() if key.startswith(name)}
        pixels = (torch.tensor(image).double() / 255.0 - wide(shape["mean"])) / wide(shape["std"])
        size, width, heads = shape["patch_size"], shape["width"], shape["heads"]
        kernel = w["patch_embed.proj.weight"]  # [width, 3, 14, 14]
        tokens = []
        for top in range(0, image.shape[0], size):
            for left in range(0, image.shape[1], size):
                patch = pixels[top : top + size, left : left + size].permute(2, 0, 1)
                tokens.append(kernel.reshape(width, -1) @ patch.flatten())
        x = torch.stack(tokens) + w["patch_embed.proj.bias"] + w["pos_embed"][0]
        if shape["class_token"]:
            x = torch.cat([w["cls_token"][0], w["reg_token"][0], x])
        for number in range(shape["used_blocks"]):
            b = f"blocks.{number}."
            y = layer_norm(x, w[b + "norm1.weight"], w[b + "norm1.bias"])
            q, k, v = (y @ w[b + "attn.qkv.weight"].T + w[b + "attn.qkv.bias"]).chunk(3, dim=1)
            mixed = torch.empty_like(q)
            for head in range(heads):
                part = slice(head * width // heads, (head + 1) * width // heads)
                mixed[:, part] = softmax(q[:, part] @ k[:, part].T / math.sqrt(width // heads)) @ v[:, part]
            y = mixed @ w[b + "attn.proj.weight"].T + w[b + "attn.proj.bias"]
            x = x + y * w.get(b + "ls1.scale_factor", 1.0)
            y = layer_norm(x, w[b + "norm2.weight"], w[b + "norm2.bias"])
            y = gelu(y @ w[b + "mlp.fc1.weight"].T + w[b + "mlp.fc1.bias"])
            y = y @ w[b + "mlp.fc2.weight"].T + w[b + "mlp.fc2.bias"]
            x = x + y * w.get(b + "ls2.scale_factor", 1.0)
        return x[5:] if shape["class_token"] else x

    def patches(self, image):
        first, second = self.config["vision_towers"]
        x = torch.cat(
            [
                self.tower("vision_backbone.featurizer.", first, image),
                self.tower("vision_backbone.fused_featurizer.", second, image),
            ],
            dim=1,
        )
        for layer in ("fc1", "fc2", "fc3"):
            x = x @ self.w[f"projector.{layer}.weight"].T + self.w[f"projector.{layer}.bias"]
            x = gelu(x) if layer != "fc3" else x
        return x

    def last_logits(self, patches, ids):
        text = self.config["text_config"]
        words = self.w["language_model.model.embed_tokens.weight"][ids]
        x = torch.cat([words[:1], patches, words[1:]])
        heads, size = text["num_attention_heads"], text["head_dim"]
        angle = wide(range(len(x)))[:, None] * text["rope_theta"] ** (-wide(range(0, size, 2)) / size)
        turn = torch.exp(1j * angle)
        hidden_future = torch.full((len(x), len(x)), -math.inf).double().triu(1)

        def norm(values, key):
            scale = torch.sqrt((values**2).mean(-1, keepdim=True) + text["rms_norm_eps"])
            return values / scale * self.w["language_model.model." + key]

        def rotate(values):  # the first half of a head is the real part, the second the imaginary one
            turned = (values[:, : size // 2] + 1j * values[:, size // 2 :]) * turn
            return torch.cat([turned.real, turned.imag], dim=1)

        for number in range(text["num_hidden_layers"]):
            prefix = f"layers.{number}."
            m = {
                key.split(".")[-2]: value
                for key, value in self.w.items()
                if key.startswith("language_model.model." + prefix) and key.endswith("_proj.weight")
            }
            y = norm(x, prefix + "input_layernorm.weight")
            q, k, v = y @ m["q_proj"].T, y @ m["k_proj"].T, y @ m["v_proj"].T
            mixed = torch.empty_like(q)
            for head in range(heads):
                part = slice(head * size, (head + 1) * size)
                scores = rotate(q[:, part]) @ rotate(k[:, part]).T / math.sqrt(size) + hidden_future
                mixed[:, part] = softmax(scores) @ v[:, part]
            x = x + mixed @ m["o_proj"].T
            y = norm(x, prefix + "post_attention_layernorm.weight")
            gate = y @ m["gate_proj"].T
            x = x + (gate / (1.0 + torch.exp(-gate)) * (y @ m["up_proj"].T)) @ m["down_proj"].T
        return self.w["language_model.lm_head.weight"] @ norm(x[-1], "norm.weight")

    def act(self, image, instruction, tokenize, key):
        """Tokens [7] and actions [7]; ``tokenize`` turns text into ids that begin with BOS."""
        if self.config["prompt_version"] == "v0.1":
            text = f"{SYSTEM} USER: What action should the robot take to {instruction.lower()}? ASSISTANT:"
        else:
            text = f"In: What action should the robot take to {instruction.lower()}?\nOut:"
        ids = [*tokenize(text), self.config["empty_token_id"]]
        patches = self.patches(image)
        tokens = []
        for _ in range(7):
            tokens.append(int(self.last_logits(patches, ids + tokens).argmax()))
        size = self.config["text_config"]["vocab_size"] - self.config["pad_to_multiple_of"]
        edges = [-1 + 2 * i / (self.config["n_action_bins"] - 1) for i in range(self.config["n_action_bins"])]
        stats = self.config["norm_stats"][key]["action"]
        actions = []
        for token, low, high, scaled in zip(tokens, stats["q01"], stats["q99"], stats["mask"], strict=True):
            bin_number = min(max(size - token - 1, 0), 254)
            value = (edges[bin_number] + edges[bin_number + 1]) / 2
            actions.append((value + 1) / 2 * (high - low) + low if scaled else value)
        return tokens, actions
