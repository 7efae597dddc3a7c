"""Weights of the golden OpenVLA cases: every array follows from its key and shape alone, the same in every run."""

import zlib

import numpy as np

ACTION_ROWS = slice(31744, 32000)  # action tokens; other rows of the head are damped so that actions win


def array(key: str, shape: tuple[int, ...]) -> np.ndarray:
    generator = np.random.Generator(np.random.Philox(key=zlib.crc32(key.encode())))
    noise = generator.standard_normal(shape, dtype=np.float32)
    if "norm" in key and key.endswith("weight"):
        return 1 + np.float32(0.1) * noise
    if key.endswith("scale_factor"):
        return np.float32(0.3) + np.float32(0.05) * noise
    if key.endswith("bias"):
        return np.float32(0.05) * noise
    if len(shape) == 1 or key.endswith(("pos_embed", "cls_token", "reg_token", "latent")):
        return np.float32(0.1) * noise
    if key.endswith("embed_tokens.weight"):
        return noise
    fan_in = int(np.prod(shape[1:]))
    noise *= np.float32(1.4 / fan_in**0.5)
    if key.endswith("lm_head.weight"):
        damp = np.full((shape[0], 1), 0.2, np.float32)
        damp[ACTION_ROWS] = 1.0
        noise *= damp
    return noise
