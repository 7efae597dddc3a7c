import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tools.checkpoints.vocabulary import PROMPT_WORDS, word_ids, write_tokenizer
from vla_ros.config import Config, TimeoutsConfig
from vla_ros_models.engine.token_engine import EngineRequest
from vla_ros_models.openvla.architecture import read_architecture
from vla_ros_models.openvla.loading import build_empty
from vla_ros_models.openvla.options import OpenVLAOptions
from vla_ros_models.openvla.policy import OpenVLAPolicy
from vla_ros_models.openvla.processing import ActionBins, read_dataset_statistics
from vla_ros_models.openvla.prompt import close_prompt
from vla_ros_models.weights import place, write_shards

FOLDER = Path(__file__).parents[2] / "data" / "openvla"


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
def checkpoint(tmp_path_factory):
    """Two files, one of which has the vision towers."""
    spec = importlib.util.spec_from_file_location("golden_weights", FOLDER / "golden_weights.py")
    golden = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(golden)
    folder = tmp_path_factory.mktemp("published")
    network = build_empty(read_architecture(FOLDER))
    shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    shutil.copy(FOLDER / "config.json", folder)
    write_tokenizer(folder, word_ids(PROMPT_WORDS, network.architecture.empty_token))
    towers = [name for name in shapes if name.startswith("vision")]
    parts = [towers, [name for name in shapes if name not in towers]]
    write_shards(
        folder, parts, lambda part: ((one, torch.from_numpy(golden.array(one, shapes[one]))) for one in part)
    )
    yield folder
    shutil.rmtree(folder)  # 3 GB


@pytest.fixture(scope="module")
def model(checkpoint):
    model = build_empty(read_architecture(FOLDER))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for file in checkpoint.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            place(model, name, tensor, device, torch.float32)
    return model.to(device)


@pytest.mark.parametrize("number", ["00", "03", "09"])
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


@pytest.mark.timeout(900)
def test_two_processes_decode_the_published_codes_tokens(checkpoint, cases):
    """With the true vision towers, one in each process."""
    options = {"unnorm_key": "alpha", "drafts": "none", "dtype": "float32", "self_test": False}
    options |= {"device": "cpu", "gpus": 2, "engine": "graph", "checkpoint": str(checkpoint)}
    policy = OpenVLAPolicy(Config(OpenVLAOptions(**options), timeouts=TimeoutsConfig(inference=60.0)))
    policy.load()
    case = cases["04"]
    image = Image.open(FOLDER / "04.png").resize((224, 224), Image.Resampling.BICUBIC)
    ids = np.array(close_prompt(case["input_ids"], read_architecture(FOLDER).empty_token))
    [found] = policy.loaded.engine.answer([EngineRequest(np.array(image), ids)])
    policy.close()
    np.testing.assert_array_equal(found.tokens, case["tokens"])
