import importlib.util
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vla_ros_models.openvla.architecture import read_architecture
from vla_ros_models.openvla.loading import build_empty
from vla_ros_models.openvla.processing import ActionBins, read_dataset_statistics
from vla_ros_models.openvla.prompt import close_prompt
from vla_ros_models.weights import place

FOLDER = Path(__file__).parents[2] / "data" / "openvla"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cases():
    """Arrays of each case by its number."""
    answers = json.loads((FOLDER / "cases.json").read_text())
    with np.load(FOLDER / "probes.npz", allow_pickle=False) as file:
        probes = dict(file)
    return {
        number: {key[3:]: value for key, value in probes.items() if key.startswith(number)} | answers[int(number)]
        for number in {key[:2] for key in probes}
    }


@pytest.fixture(scope="module")
def model():
    spec = importlib.util.spec_from_file_location("golden_weights", FOLDER / "golden_weights.py")
    golden = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(golden)
    model = build_empty(read_architecture(FOLDER))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for name, array in zip(shapes, threads.map(golden.array, shapes.keys(), shapes.values()), strict=True):
            place(model, name, torch.from_numpy(array), device, torch.float32)
    return model.to(device)


@pytest.mark.parametrize("number", ["00", "03", "04", "09"])
@torch.inference_mode()
def test_the_published_codes_tokens_and_actions(model, cases, number):
    case = cases[number]
    image = Image.open(FOLDER / f"{number}.png").resize((224, 224), Image.Resampling.BICUBIC)
    pixels = model.normalize(torch.from_numpy(np.array(image))[None].to(model.device))
    np.testing.assert_allclose(pixels[0, :, ::37, ::41].cpu(), case["pixel_probe"], atol=1e-6)
    np.testing.assert_allclose(pixels[0].mean((1, 2)).cpu(), case["pixel_mean"], atol=1e-5)

    patches = model.embed_image(pixels)
    np.testing.assert_allclose(patches[0, ::31, ::17].cpu(), case["projector_probe"], atol=5e-4)
    ids = close_prompt(case["input_ids"], model.architecture.empty_token)
    logits, cache = model.prefill(patches, torch.tensor([ids], device=model.device))
    best = logits[0].topk(3)
    np.testing.assert_array_equal(best.indices.cpu(), case["logit_top_ids"])
    np.testing.assert_allclose(best.values.cpu(), case["logit_top"], atol=1e-4)

    tokens = model.greedy(logits, cache, 7).tokens[0].cpu().numpy()
    np.testing.assert_array_equal(tokens, case["tokens"])
    normalized = ActionBins(model.architecture.action_vocab_size).decode(tokens)
    np.testing.assert_array_equal(normalized, case["normalized"])
    for key, statistics in read_dataset_statistics(FOLDER).items():
        np.testing.assert_allclose(statistics.unnormalize(normalized), case[f"action_{key}"], atol=1e-12)
