"""Losses, gradients and three optimiser steps as published code computed them, within 1e-4 of their size."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
pytest.importorskip("peft", reason="the library peft is not installed (extra 'train')")

import torch
from safetensors.torch import load_file

from test.policies.oft.conftest import make_policy
from test.policies.pi.conftest import write_layout
from vla_ros.config import load
from vla_ros.policies.base import create
from vla_ros.vision.processors import crop_center
from vla_ros_lab.training.adapting import AdapterOptions, adapt
from vla_ros_lab.training.augmentation import AUGMENTATIONS, openpi_image, openvla_crop, without_crop
from vla_ros_lab.training.recipes import groot_cosine, lerobot_cosine, openpi_cosine, recipe_of
from vla_ros_lab.training.trainer import TrainOptions, make_optimizer
from vla_ros_models.engine.stream import Stream
from vla_ros_models.engine.training import TrainingOps
from vla_ros_models.groot.training import GrootTrainee, training_actions
from vla_ros_models.network_policy import Placement
from vla_ros_models.openvla.training import TokenBatch
from vla_ros_models.pi.training import FlowBatch
from vla_ros_models.training import pad_numbers

DATA = Path(__file__).parents[1] / "data"
OTHER = Path(os.environ.get("VLA_ROS_GOLDEN", "/nonexistent"))
CPU = Placement(torch.device("cpu"), "float32")


class Golden(dict):
    """The arrays of one file."""

    def __init__(self, name):
        folder = DATA if (DATA / "finetune" / f"{name}.npz").is_file() else OTHER
        with np.load(folder / "finetune" / f"{name}.npz") as file:
            super().__init__({key: file[key] for key in file})
        self.name = name

    def tensor(self, name):
        return torch.from_numpy(self[name])

    def thinned(self, name, tensor):
        """The numbers of ``tensor`` that the file has of the entry ``name``."""
        flat = tensor.detach().flatten()
        step = -(-flat.numel() // 1024)
        return flat[::step][:: int(self.get(f"every.{name}", 1))].numpy()


def trainable(folder, *options, **own):
    policy = create(load([], [f"policy.checkpoint:={folder}", *options]))
    return policy.trainable(CPU, False, **own)


def compare(golden, loss_of, parameters):
    """Compare the loss, every gradient, and three steps of AdamW; ``parameters`` have the file's names."""
    loss = loss_of()
    assert loss.item() == pytest.approx(float(golden["loss"]), rel=1e-4)
    loss.backward()
    total = float(golden["grad_norm_total"])
    names = dict(zip(golden["grad_names"].tolist(), golden["grad_norms"].tolist(), strict=True))
    found = {name: one for name, one in parameters.items() if one.grad is not None}
    missing = {name for name, norm in names.items() if norm > 0} - found.keys()
    assert not missing
    for name, norm in names.items():
        if norm > 0:
            assert found[name].grad.double().norm().item() == pytest.approx(norm, rel=1e-4, abs=1e-6 * total), name
    for key in [key for key in golden if key.startswith("grad.")]:
        wanted = golden[key]
        got = golden.thinned(key, found[key.removeprefix("grad.")].grad)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max() + 1e-9, err_msg=key)


def check_steps(golden, loss_of, parameters, rates=None):
    """Do the file's three steps; compare the losses, and parameters whose gradient is not near zero."""
    said = json.loads(str(golden["optimizer"]))
    chosen = [one for name, one in parameters.items() if name in set(golden["grad_names"].tolist())]
    optimizer = torch.optim.AdamW(
        chosen, lr=said.get("lr", 1e-3), betas=said["betas"], eps=said["eps"], weight_decay=said["weight_decay"]
    )
    gradients = {}
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of()
        assert loss.item() == pytest.approx(float(golden["step_loss"][step]), rel=1e-3)
        loss.backward()
        gradients = gradients or {
            name: one.grad.clone() for name, one in parameters.items() if one.grad is not None
        }
        if said["grad_clip_norm"]:
            torch.nn.utils.clip_grad_norm_(chosen, said["grad_clip_norm"])
        for group in optimizer.param_groups if rates is not None else ():
            group["lr"] = float(rates[step])
        optimizer.step()
    assert loss_of().item() == pytest.approx(float(golden["step_loss"][3]), rel=1e-3)
    for key in [key for key in golden if key.startswith("after3.")]:
        name = key.removeprefix("after3.")
        if name not in gradients:  # a part that never runs
            assert dict(zip(golden["grad_names"].tolist(), golden["grad_norms"], strict=True))[name] <= 0
            continue
        clear = np.abs(golden.thinned(key, gradients[name])) > 1e-5
        got = golden.thinned(key, parameters[name])
        np.testing.assert_allclose(got[clear], golden[key][clear], rtol=1e-3, atol=1e-5, err_msg=key)


def flow_parameters(found, prefix):
    """Parameters by the names in the published code, where a tied tensor may have its other name."""
    tied = "paligemma.lm_head", "paligemma.model.language_model.embed_tokens"
    named = ((found.names[name], one) for name, one in found.trainee.named_parameters() if name in found.names)
    return {prefix + name.replace(*tied): one for name, one in named}


def lerobot_batch(golden, found):
    inputs, keys = found.inputs, [key for key in golden if key.startswith("observation.images")]
    rows = range(len(golden["time"]))
    images = [
        np.stack(inputs.processing.prepared_images({key: golden[key][row] for key in keys}, inputs.side))
        for row in rows
    ]
    tokens, valid = golden.tensor("tokens").long(), golden.tensor("token_mask")
    if inputs.state_token:  # the state's place ends each prompt
        counts = valid.sum(1)
        tokens = torch.nn.functional.pad(tokens, (0, 1))
        valid = torch.arange(tokens.shape[1]) <= counts[:, None]
    return FlowBatch(
        torch.from_numpy(np.stack(images)),
        torch.ones(len(images), len(keys), dtype=torch.bool),
        tokens,
        valid,
        torch.from_numpy(pad_numbers(golden["state_normalized"], inputs.state_dim)),
        torch.from_numpy(pad_numbers(golden["actions_normalized"], inputs.action_dim)),
        golden.tensor("action_is_pad"),
        golden.tensor("noise"),
        golden.tensor("time"),
    )


def openpi_batch(golden, found):
    keys = [key for key in golden if key.startswith("image_") and not key.startswith("image_mask")]
    images = np.stack([np.kron(golden[key], np.ones((1, 4, 4, 1), np.uint8)) for key in keys], axis=1)
    actions = golden.tensor("actions_normalized")
    return FlowBatch(
        torch.from_numpy(images),
        torch.stack([golden.tensor(key.replace("image_", "image_mask_")) for key in keys], dim=1),
        golden.tensor("tokens").long(),
        golden.tensor("token_mask"),
        golden.tensor("state_normalized"),
        actions,
        torch.zeros(actions.shape[:2], dtype=torch.bool),
        golden.tensor("noise"),
        golden.tensor("time"),
    )


@pytest.mark.parametrize("name", ["pi05_lerobot_full", "pi05_openpi_full", "pi0_openpi_full"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_pi(tmp_path, name, recomputed):
    kind, layout, _ = name.split("_")
    folder = tmp_path / layout
    write_layout(folder, kind, layout)
    options = [f"policy.tokenizer:={DATA}/pi/tokenizer.model"] if layout == "openpi" else []
    found = trainable(folder, *options, *(["policy.robot:=aloha"] if layout == "openpi" else []))
    golden = Golden(name)
    batch = (lerobot_batch if layout == "lerobot" else openpi_batch)(golden, found)
    found.trainee.recompute_layers = recomputed
    found.trainee.train().requires_grad_(True)
    parameters = flow_parameters(found, "model." if layout == "lerobot" else "")
    unused = {
        one for one, norm in zip(golden["grad_names"].tolist(), golden["grad_norms"], strict=True) if norm == 0
    }
    assert unused == {one for one in unused if one.endswith("layers.2.self_attn.q_proj.weight")}
    compare(golden, lambda: found.trainee(batch).total, parameters)
    if not recomputed:
        check_steps(golden, lambda: found.trainee(batch).total, parameters, golden.get("step_lr"))
        recipe = recipe_of(kind, layout)
        said = json.loads(str(golden["optimizer"]))
        assert [*recipe.betas, recipe.weight_decay, recipe.clip] == [
            *said["betas"], said["weight_decay"], said["grad_clip_norm"]
        ]  # fmt: skip


def smolvla():
    return trainable(DATA / "smolvla" / "default", f"policy.vlm:={DATA}/smolvla/vlm", mask_padding=True)


def test_smolvla():
    found, golden = smolvla(), Golden("smolvla_default_expert")
    adapt(found, recipe_of("smolvla", ""), AdapterOptions("full"), "cpu")
    batch, parameters = lerobot_batch(golden, found), flow_parameters(found, "model.")
    compare(golden, lambda: found.trainee(batch).total, parameters)
    trained = {name for name, one in parameters.items() if one.requires_grad}
    assert trained == set(golden["grad_names"].tolist())
    check_steps(golden, lambda: found.trainee(batch).total, parameters)


LORA = {
    "pi05_lerobot_lora": "",
    "pi05_lerobot_lora_all": r"paligemma_with_expert\.(paligemma\.model\.language_model|gemma_expert\.model)\.lay"
    r"ers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)|(action_(in|out)_proj|time_mlp_(in|out))",
    "smolvla_default_lora": "",
    "pi0_lerobot_lora": "",
    "pi0_lerobot_lora_twin": "",
    "oft_l1_lora": "",
    "oft_film_lora": "",
    "oft_film_lora_twin": "",
    "groot_lerobot_lora": "",
}


@pytest.mark.parametrize("name", LORA)
def test_lora(tmp_path, name):
    """Adapters on the published targets, from the published start."""
    golden = Golden(name)
    if name.startswith("pi0"):
        write_layout(tmp_path / "lerobot", name.partition("_")[0], "lerobot")
        found, prefix = trainable(tmp_path / "lerobot"), "model."
    elif name.startswith("smolvla"):
        found, prefix = smolvla(), "model."
    elif name.startswith("groot"):
        (found, batch), prefix = groot(golden), "_groot_model."
    elif "film" in name:
        found, prefix = make_policy("aloha_film").trainable(CPU), ""
        published_pixels(found)
    else:
        found, prefix = trainable(DATA / "oft" / "libero_l1", "preset:=libero", "policy.name:=oft"), ""
    alpha = {"": 4, "model.": 8}.get(prefix, 2)
    options = AdapterOptions("lora", rank=4, alpha=alpha, targets=LORA[name])
    adapted = adapt(found, recipe_of(found.family, found.layout), options, "cpu")
    stored = load_file(DATA / "finetune" / f"{name}.safetensors")
    parameters = {}
    for layer, own in adapted.layers.items():
        own = film_name(own) if "film" in name else own
        for which, factor in zip("AB", adapted.factors(layer), strict=True):
            outer = prefix if prefix == "_groot_model." else f"base_model.model.{prefix}"
            factor.copy_(stored[f"{outer}{own}.lora_{which}.weight"])
            outer = "vla.base_model.model." if prefix == "" else outer
            one = found.trainee.get_submodule(layer)
            wrapped = (one.lora_A if which == "A" else one.lora_B)["default"].weight
            parameters[f"{outer}{own}.lora_{which}.default.weight"] = wrapped
    for own, name_of in adapted.whole.items():
        one = dict(found.trainee.named_parameters())[own]
        film = "film" in name and name_of.startswith("vision_backbone")
        name_of = f"vla.base_model.model.{film_name(name_of)}" if film else name_of
        parameters[name_of.replace("action_head.", "action_head.model.")] = one
    if not name.startswith("groot"):
        batch = oft_batch(golden, found) if name.startswith("oft") else lerobot_batch(golden, found)
    compare(golden, lambda: found.trainee(batch).total, parameters)
    check_steps(golden, lambda: found.trainee(batch).total, parameters)


def published_pixels(found):
    """Normalise images by the numbers that are not rounded, as the reference did."""
    backbone = found.trainee.network.vision_backbone
    backbone.mean = torch.tensor([0.485, 0.456, 0.406, 0.5, 0.5, 0.5]).view(1, -1, 1, 1)
    backbone.std = torch.tensor([0.229, 0.224, 0.225, 0.5, 0.5, 0.5]).view(1, -1, 1, 1)


def film_name(name):
    """The name of a tensor or layer in the published module with FiLM."""
    name = re.sub(r"(blocks\.\d+)\.(?!scale|shift)", r"\1.block.", name)
    return re.sub("^vision_backbone", "vision_backbone.vision_backbone", name)


def oft_batch(golden, found):
    labels, tokens = golden.tensor("labels").long(), golden.tensor("input_ids").long()
    tokens[tokens == 29871] = 317  # of the small vocabulary
    tokens[tokens >= found.trainee.network.architecture.llm.vocab_size] = 1
    size = 224 // golden["image"].shape[2]
    images = np.kron(golden["image"], np.ones((1, 1, size, size, 1), np.uint8))
    return TokenBatch(
        torch.from_numpy(images), tokens, labels, (labels != -100) & (labels != 2), golden.tensor("attention_mask"),
        golden.tensor("actions_normalized"), golden.tensor("proprio_normalized"),
    )  # fmt: skip


class PaddedLeft(GrootTrainee):
    """LeRobot pads left: the language model's attention is zero there, and the connector sees what comes of it."""

    pad = 380  # of the small tokenizer

    def _encode(self, batch):
        hidden, ops, text = super()._encode(batch).clone(), TrainingOps(), self.backbone.text
        row = self.backbone.embedding[self.pad][None, None]
        for index, layer in enumerate(text.layers):
            stream = Stream(row, 2 * index + 1)
            row = ops.add(text, stream, ops.gate_up(text, index, stream, None), layer.down_proj, None).hidden
        hidden[~batch.valid] = row[0, 0]
        return hidden


def groot(golden):
    """The checkpoint for training, and the file's batch, which is compared with what the inputs prepare."""
    folder = DATA / "groot" / "lerobot_relative"
    found = trainable(folder, f"policy.backbone:={DATA}/groot/backbone", state_dropout=0.0)
    found.trainee.__class__, found.trainee.connect_padding = PaddedLeft, True
    inputs, processing = found.inputs, found.inputs.processing
    samples = []
    for row, text in enumerate(golden["prompt"].tolist()):
        images = [processing.resize(golden[f"observation.images.{key}"][row]) for key in processing.images]
        prompt = inputs.prompt.encode(text, [tuple(side // 32 for side in image.shape[:2]) for image in images])
        actions = training_actions(
            processing, golden["action"][row], golden["state"][row], golden["action_is_pad"][row]
        )
        counted = golden["action_mask"][row][:, : actions.shape[1]] > 0
        np.testing.assert_allclose(
            np.where(counted, actions, 0),
            np.where(counted, golden["action_model"][row][:, : actions.shape[1]], 0),
            atol=2e-6,
        )
        state = processing.normalized_state(golden["state"][row], inputs.sizes.state_dim)
        np.testing.assert_allclose(state, golden["state_model"][row, 0], atol=1e-6)
        samples.append(
            {"images": np.stack(images), "tokens": prompt.tokens, "positions": prompt.positions, "state": state,
             "valid": np.ones(len(prompt.tokens), np.bool_), "actions": golden["action_model"][row],
             "counts": golden["action_mask"][row] > 0, "noise": golden["noise"][row], "time": golden["time"][row]}
        )  # fmt: skip
    return found, inputs.collate(samples)


def test_groot():
    golden = Golden("groot_lerobot_relative")
    found, batch = groot(golden)
    adapt(found, recipe_of("groot", ""), AdapterOptions("full"), "cpu")
    parameters = {f"_groot_model.{found.names[name]}": one for name, one in found.trainee.named_parameters()}
    each = re.compile(r".*\.(state_encoder|action_encoder|action_decoder)\.")
    for key in [key for key in golden if key.startswith(("grad.", "after3.")) and each.match(key)]:
        del golden[key]  # thinned over the entries of all embodiments
    compare(golden, lambda: found.trainee(batch).total, parameters)
    check_steps(golden, lambda: found.trainee(batch).total, parameters)


GOLDEN_FILES = pytest.mark.skipif(
    not (OTHER / "finetune").is_dir(), reason="needs the golden files of VLA_ROS_GOLDEN"
)


@GOLDEN_FILES
def test_openpi_lora(tmp_path):
    """The recipe's targets, and what trains in full beside them, are those of openpi's JAX code."""
    golden = Golden("pi05_openpi_lora")
    write_layout(tmp_path / "openpi", "pi05", "openpi")
    found = trainable(tmp_path / "openpi", f"policy.tokenizer:={DATA}/pi/tokenizer.model", "policy.robot:=aloha")
    adapted = adapt(found, recipe_of("pi05", "openpi"), AdapterOptions("lora"), "cpu")
    ranks = {adapted.factors(layer)[0].shape[0] for layer in adapted.layers}
    assert ranks == {16, 32}
    again = trainable(tmp_path / "openpi", f"policy.tokenizer:={DATA}/pi/tokenizer.model", "policy.robot:=aloha")
    recipe = replace(recipe_of("pi05", "openpi").lora, ranks={}, both=0.0)
    recipe = replace(recipe_of("pi05", "openpi"), lora=recipe)
    adapted = adapt(again, recipe, AdapterOptions("lora", rank=4, alpha=4), "cpu")
    parameters = {
        f"base_model.model.{name}": one
        for own, name in adapted.whole.items()
        for one in [dict(again.trainee.named_parameters())[own]]
    }
    for layer, name in adapted.layers.items():
        one = again.trainee.get_submodule(layer)
        for which, part in (("A", one.lora_A), ("B", one.lora_B)):
            key = f"base_model.model.{name}.lora_{which}.default.weight"
            part["default"].weight.data.copy_(golden.tensor(f"init.{key}"))
            parameters[key] = part["default"].weight
    moved = {
        name for name, norm in zip(golden["grad_names"].tolist(), golden["grad_norms"], strict=True) if norm > 0
    }
    assert moved == parameters.keys() & set(golden["grad_names"].tolist())
    assert parameters.keys() == moved
    batch = openpi_batch(golden, again)
    compare(golden, lambda: again.trainee(batch).total, parameters)
    check_steps(golden, lambda: again.trainee(batch).total, parameters, golden["step_lr"])


@GOLDEN_FILES
@pytest.mark.parametrize("name", ["openvla_lora", "oft_discrete_lora"])
def test_tokens(name):
    golden, folder = Golden(name), OTHER / "oft" / "libero_discrete"
    family = name.split("_")[0]
    options = ["preset:=libero"] if family == "oft" else ["policy.unnorm_key:=libero_object_no_noops"]
    found = trainable(folder, f"policy.name:={family}", *options)
    adapted = adapt(found, recipe_of(found.family, found.layout), AdapterOptions("lora", rank=4, alpha=4), "cpu")
    published_pixels(found)
    stored = load_file(OTHER / "finetune" / name / "adapter_model.safetensors")
    parameters = {}
    for layer, own in adapted.layers.items():
        one = found.trainee.get_submodule(layer)
        for which, part in (("A", one.lora_A), ("B", one.lora_B)):
            part["default"].weight.data.copy_(stored[f"base_model.model.{own}.lora_{which}.weight"])
            parameters[f"vla.base_model.model.{own}.lora_{which}.default.weight"] = part["default"].weight
    labels = golden.tensor("labels").long()
    images = np.kron(golden["image"], np.ones((1, 1, 4, 4, 1), np.uint8))
    batch = TokenBatch(
        torch.from_numpy(images), golden.tensor("input_ids").long(), labels, (labels != -100) & (labels != 2),
        golden.tensor("attention_mask"), golden.tensor("actions_normalized"),
    )  # fmt: skip
    compare(golden, lambda: found.trainee(batch).total, parameters)
    check_steps(golden, lambda: found.trainee(batch).total, parameters)


@pytest.mark.parametrize(
    ("name", "peak", "schedule"),
    [
        ("lerobot_cosine_30000", 2.5e-5, lambda step: lerobot_cosine(step, 30_000)),
        ("lerobot_cosine_3000", 2.5e-5, lambda step: lerobot_cosine(step, 3000)),
        ("lerobot_cosine_300", 2.5e-5, lambda step: lerobot_cosine(step, 300)),
        ("openpi_default", 2.5e-5, lambda step: openpi_cosine(step, 30_000)),
        ("groot_cosine_1000", 1e-4, lambda step: groot_cosine(step, 1000)),
    ],
)
def test_schedules(name, peak, schedule):
    with np.load(DATA / "finetune" / "schedules.npz") as file:
        steps, rates = file[f"{name}.step"], file[f"{name}.lr"]
    np.testing.assert_allclose([peak * schedule(int(step)) for step in steps], rates, rtol=1e-12)


def test_openpi_augmentation():
    with np.load(DATA / "finetune" / "augment_openpi_pytorch.npz") as file:
        draws = file["draw"].tolist()
        for key, geometry, colour in (
            ("base_0_rgb", draws[:3], draws[3:6]), ("left_wrist_0_rgb", None, draws[6:9])
        ):  # fmt: skip
            images = np.kron(file[f"image_{key}"], np.ones((1, 4, 4, 1), np.uint8))
            for image, wanted in zip(images, file[f"out_probe_{key}"], strict=True):
                planes = torch.from_numpy(image).permute(2, 0, 1).float() / 255
                found = openpi_image(planes, geometry, colour) * 2 - 1
                np.testing.assert_allclose(found[:, ::9, ::7].numpy(), wanted, atol=2e-6)


def test_the_random_crop_of_openvla():
    """In the middle it is the centre crop of evaluation, with TensorFlow's numbers; its ends are the image's."""
    image = np.random.default_rng(0).integers(0, 256, (224, 224, 3), np.uint8)
    planes = torch.from_numpy(image).permute(2, 0, 1).float() / 255
    found = openvla_crop(planes, 0.9, 0.5, 0.5).permute(1, 2, 0).numpy()
    difference = np.floor(found * 255.5) - crop_center(image, 0.9)  # TensorFlow's way to bytes
    assert np.abs(difference).max() <= 1
    assert np.abs(difference).mean() < 1e-3
    corners = [openvla_crop(planes, 0.9, *at)[:, -int(at[0]), -int(at[1])] for at in ((0.0, 0.0), (1.0, 1.0))]
    for corner, at in zip(corners, (0, -1), strict=True):
        torch.testing.assert_close(corner, planes[:, at, at], atol=1e-5, rtol=0)
    spec = create(
        load([], ["preset:=libero", "policy.name:=oft", f"policy.checkpoint:={DATA}/oft/libero_l1"])
    ).describe()
    whole, areas = without_crop(spec.images)
    assert set(areas.values()) == {0.9}
    seen, cropped = (one.processor(image) for one in (whole[0], spec.images[0]))
    assert np.abs(crop_center(seen, 0.9).astype(int) - cropped).max() == 0
    augment, key = AUGMENTATIONS["openvla"], spec.images[0].key
    plain, random = (augment(key, seen, np.random.default_rng(1), areas=one) for one in ({}, areas))
    assert plain.shape == random.shape
    assert np.abs(plain - random).max() > 0.1


def test_a_recipe_makes_its_optimizer():
    found = smolvla()
    recipe = recipe_of("smolvla", "")
    adapted = adapt(found, recipe, AdapterOptions("full"), "cpu")
    group = make_optimizer(adapted, recipe, TrainOptions()).param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-4, (0.9, 0.95), 1e-10)
