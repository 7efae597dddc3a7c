"""One inference on the reference path, and the engine, which is compared with it at start."""

import importlib.util
import logging
import time
from collections.abc import Sequence

import numpy as np
import torch

from vla_ros.errors import ConfigError
from vla_ros.types import FloatArray, IntArray, RawImage, UInt8Array
from vla_ros.vision.preprocess import process
from vla_ros_models.engine.device_errors import EngineMismatchError, require_finite
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.resizer import resizes
from vla_ros_models.engine.token_engine import Encode, EngineOptions, EngineRequest, TokenEngine
from vla_ros_models.engine.tolerances import GUARD_SLACK, TOLERANCES
from vla_ros_models.engine.weights import DecoderWeights, fuse
from vla_ros_models.openvla.network import OpenVLAModel, VisionEncoder, to_device
from vla_ros_models.openvla.options import CheckpointOptions

logger = logging.getLogger(__name__)


def choose_engine(options: CheckpointOptions, device: torch.device) -> str:
    """Resolve ``policy.engine``.

    ``auto`` means ``graph`` with quantised weights, on several GPUs, or with Triton on Ampere or later.
    """
    if options.engine == "reference" and options.gpus > 1:
        raise ConfigError(
            f"policy.gpus: {options.gpus} with policy.engine reference, which runs on one device; set "
            "policy.engine to auto"
        )
    if options.engine == "reference" and options.quantization != "none":
        raise ConfigError(
            f"policy.quantization: {options.quantization} with policy.engine reference, which runs only "
            "unquantised weights; set policy.engine to auto"
        )
    if options.engine != "auto":
        return options.engine
    has_triton = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    has_kernels = has_triton and torch.cuda.get_device_capability(device) >= (8, 0)
    return "graph" if has_kernels or options.quantization != "none" or options.gpus > 1 else "reference"


@torch.inference_mode()
def infer_reference(
    model: OpenVLAModel, image: UInt8Array, prompt: IntArray, count: int
) -> tuple[IntArray, FloatArray, dict[str, float]]:
    """Decode ``count`` tokens greedily from an RGB image, uint8 [H, W, 3], and a prompt.

    ``prompt`` is int64 [L]. Returns the tokens, int64 [count], their logit margins (best minus second-best) and the
    duration of each stage in milliseconds. Raises NotFiniteError if a margin is NaN or Inf.
    """
    stages: dict[str, float] = {}
    began = time.perf_counter()

    def end(stage: str) -> None:
        if model.device.type == "cuda":
            torch.cuda.current_stream(model.device).synchronize()  # a device-wide wait would break a capture
        stages[stage] = 1e3 * (time.perf_counter() - began) - sum(stages.values())

    pixels = model.normalize(to_device(image, model.device))
    end("preprocess")
    patches = model.embed_image(pixels)
    end("vision")
    logits, prefix = model.prefill(patches, torch.from_numpy(prompt)[None].to(model.device), room=count)
    end("prefill")
    found = model.greedy(logits, prefix, count)
    end("decode")
    margins: FloatArray = found.margins[0].double().cpu().numpy()
    require_finite(margins.tolist())
    return found.tokens[0].cpu().numpy(), margins, stages


def check_engine(
    model: OpenVLAModel, engine: TokenEngine, images: Sequence[UInt8Array], prompt: IntArray, count: int
) -> None:
    """Raise EngineMismatchError if a token differs where the reference path has a clear margin."""
    near = TOLERANCES[engine.weights.dtype].near_tie
    for image in images:
        expected, margins, _ = infer_reference(model, image, prompt, count)
        found = engine.answer([EngineRequest(image, prompt)])[0].tokens
        differing = np.flatnonzero(found != expected)
        # Only the first difference counts, because later tokens follow another prefix.
        if differing.size and margins[differing[0]] > near:
            raise EngineMismatchError(
                f"the engine decodes {found.tolist()}, the reference path {expected.tolist()}: token "
                f"{differing[0]} differs, although its logit leads by {margins[differing[0]]:.2g}"
            )


def fit_guard(engine: TokenEngine, images: Sequence[UInt8Array], prompt: IntArray) -> None:
    """Raise the engine's guard if these weights make drafted logits differ more than usual.

    The tokens decoded for each image serve as drafts for all images.
    """
    if engine.options.drafts != "prefill":
        return
    answers = [engine.answer([EngineRequest(image, prompt)])[0].tokens for image in images]
    largest = max(engine.draft_error(image, prompt, tokens) for image in images for tokens in answers)
    if not GUARD_SLACK * largest <= engine.guard:
        logger.info(
            "policy.drafts: drafted tokens need a logit margin of %.2g instead of %.2g, because prefill and "
            "decoding differ by up to %.2g with these weights",
            GUARD_SLACK * largest,
            engine.guard,
            largest,
        )
        engine.guard = GUARD_SLACK * largest


def check_resizing(engine: TokenEngine, frame: RawImage) -> None:
    """Check that the engine processes a camera image bit for bit as the host does; warms up both.

    With graphs, compares twice: without a graph, as for the first image of each size, and with a graph. Processors
    without exact resampling steps are skipped, because the host runs them.
    """
    if not resizes(engine.weights.device, frame):
        return
    expected = process(frame)
    for _ in range(2 if engine.runner.graphs else 1):
        found = engine.resized(frame)
        if not np.array_equal(found, expected):
            height, width, _ = frame.pixels.shape
            raise EngineMismatchError(
                f"{engine.weights.device} resizes an image of {width}x{height} differently from the host: "
                f"{np.mean(found != expected):.2%} of the values differ"
            )
        engine.wait()


def make_engine(
    model: OpenVLAModel,
    answer: int,
    quantization: str = "none",
    drafts: str = "prefill",
    *,
    keep: bool = True,
    weights: DecoderWeights | None = None,
    ops: Ops | None = None,
    encode: Encode | None = None,
) -> TokenEngine:
    """Return an engine that runs the weights of ``model``.

    ``model`` must be loaded, unquantised and on its device. ``answer`` is the number of tokens to decode;
    ``drafts`` is ``policy.drafts``. With ``keep``, ``model`` stays usable: dense weights are shared, and quantised
    weights are copies. Without ``keep``, the decoder's dense weights are freed layer by layer. ``weights`` are from
    :func:`~vla_ros_models.openvla.loading.fill_quantized`. ``ops`` and ``encode`` default to those of the device.
    """
    size = model.architecture.image_size
    if weights is None:
        weights = fuse(model.language_model, quantization, keep=keep)
    return TokenEngine(
        VisionEncoder(model) if encode is None else encode,
        weights,
        model.architecture.patches,
        EngineOptions(answer=answer, image_size=(size, size), drafts=drafts),
        ops,
    )
