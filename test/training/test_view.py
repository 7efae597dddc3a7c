"""Viewpoint adapters: what they compute, what is written and loaded, and which files are refused."""

import json
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
pytest.importorskip("accelerate", reason="the library accelerate is not installed (extra 'train')")
pytest.importorskip("peft", reason="the library peft is not installed (extra 'train')")

import torch
from safetensors.torch import load_file, save_file

from test.training.runs import CPU, OPTIONS, ArmSamples, opened, policy_of, run
from vla_ros.errors import CheckpointError, ConfigError
from vla_ros.policies.remote.spec import decode_spec, encode_spec
from vla_ros.types import Observation
from vla_ros_lab.training.recipes import recipe_of, view_recipe
from vla_ros_models.evidence import sha256
from vla_ros_models.view import FORMAT, VIEW_FILE, VIEWS, add_view, base_digest, layers_of, write_view

FAMILIES = ("openvla", "oft", "pi05", "smolvla", "groot")


def drawn(parts):
    """Return values for what trains of an adapter."""
    random = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(one.shape, generator=random) * 0.1 + float(name.endswith(".scale"))
        for name, one in parts.items()
    }


@cache
def adapter_of(family, kind):
    """Return the digest of a family's weights, and an adapter of random numbers."""
    folder, settings = OPTIONS[family]
    trainable = policy_of(folder, *settings).trainable(CPU)
    return base_digest(trainable.stored), drawn(add_view(trainable, kind))


def written(tmp_path, family, kind):
    """Write an adapter of random numbers, and return its file and its tensors."""
    digest, tensors = adapter_of(family, kind)
    write_view(tmp_path / VIEW_FILE, kind, digest, tensors)
    return tmp_path / VIEW_FILE, tensors


def batch_of(trainable):
    samples = ArmSamples(trainable.spec)
    prepare = trainable.inputs.prepare
    return trainable.inputs.collate(
        [
            prepare(one.observation, one.actions, one.is_pad, np.random.default_rng(1))
            for one in (samples[0], samples[20])
        ]
    )


def chunk_of(policy):
    policy.load()
    one = ArmSamples(policy.spec)[5].observation
    noise = np.random.default_rng(2).standard_normal(policy.spec.noise) if policy.spec.noise else None
    seen = Observation(one.images, one.instruction, stamp=0, state=one.state, noise=noise)
    found = policy.infer(policy.start_session(), seen)
    numbers = found.info.get("logit_margins", found.normalized)
    policy.close()
    return np.array(numbers, np.float64)


@cache
def plain_of(family):
    """Return the chunk and the spec of a family's policy without an adapter."""
    folder, settings = OPTIONS[family]
    policy = policy_of(folder, *settings)
    return chunk_of(policy), policy.spec


def by_hand(folder, target, tensors):
    """Write the checkpoint with the adapter's arithmetic in NumPy's float64, as the paper's formulas say."""
    shutil.copytree(folder, target, symlinks=False, ignore=shutil.ignore_patterns("README.md"))
    for place in (folder, *folder.resolve().parents[:2]):
        if (place / "architecture.json").is_file() and not (target / "architecture.json").exists():
            shutil.copyfile(place / "architecture.json", target / "architecture.json")
    wide = {name: one.numpy().astype(np.float64) for name, one in tensors.items()}
    layers = {name.rpartition(".")[0] for name in tensors}
    done = set()
    for path in target.glob("model*.safetensors"):
        content = load_file(path)
        for stored in list(content):
            layer, _, leaf = stored.removeprefix("model.").removeprefix("_groot_model.").rpartition(".")
            if layer not in layers:
                continue
            done.add(layer)
            value = content[stored].double().numpy()
            if f"{layer}.scale" in wide:
                scale, shift = wide[f"{layer}.scale"], wide[f"{layer}.shift"]
                value = scale[:, None] * value if leaf == "weight" else scale * value + shift
                if f"{stored.rpartition('.')[0]}.bias" not in content:
                    content[f"{stored.rpartition('.')[0]}.bias"] = torch.from_numpy(shift).float()
            elif leaf == "weight":
                value = value + wide[f"{layer}.b"] @ wide[f"{layer}.a"]
            content[stored] = torch.from_numpy(value).float()
        save_file(content, path, metadata={"format": "pt"})
    assert done == layers
    return target


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_policy_runs_the_papers_arithmetic(tmp_path, family, kind):
    folder, settings = OPTIONS[family]
    file, tensors = written(tmp_path, family, kind)
    plain, _ = plain_of(family)
    viewed = policy_of(folder, *settings, f"policy.view:={file}")
    merged = chunk_of(viewed)
    assert viewed.spec.view == sha256(file)
    hand = chunk_of(policy_of(by_hand(folder, tmp_path / "hand", tensors), *settings))
    assert np.abs(merged - plain).max() > 1e-3 * plain.std()
    np.testing.assert_allclose(merged, hand, atol=2e-4 * max(1.0, plain.std()))


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_that_changes_nothing_changes_no_bit(tmp_path, family, kind):
    folder, settings = OPTIONS[family]
    digest, tensors = adapter_of(family, kind)
    neutral = {name: torch.full_like(one, float(name.endswith(".scale"))) for name, one in tensors.items()}
    write_view(tmp_path / VIEW_FILE, kind, digest, neutral)
    plain, spec = plain_of(family)
    viewed = policy_of(folder, *settings, f"policy.view:={tmp_path / VIEW_FILE}")
    assert np.array_equal(plain, chunk_of(viewed))
    assert spec.view == ""


@pytest.mark.parametrize("family", ["openvla", "oft", "pi05", "smolvla"])
def test_tokens_are_scaled_and_shifted_behind_the_projector(family):
    """The same loss as with the published formula on the projector's output, which is not merged."""
    folder, settings = OPTIONS[family]
    merged, plain = (policy_of(folder, *settings).trainable(CPU) for _ in range(2))
    parts = add_view(merged, "view")
    values = drawn(parts)
    for name, part in parts.items():
        part.data.copy_(values[name])
    (scale, shift) = (
        next(one for name, one in values.items() if name.endswith(end)) for end in (".scale", ".shift")
    )
    for one in (merged, plain):
        getattr(one.trainee, "open_vision", dict)()
    plain.trainee.network.projector.register_forward_hook(lambda module, inputs, tokens: tokens * scale + shift)
    batch = batch_of(plain)
    with torch.no_grad():
        assert merged.trainee(batch).total.item() == pytest.approx(plain.trainee(batch).total.item(), rel=1e-5)


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_adapter_trains_along_its_gradient(family, kind):
    """The gradient is the slope of the loss, also through GR00T's backbone, which other adapters leave frozen."""
    adapted = opened(family, kind)
    assert {*map(id, adapted.parameters.values())} == {*map(id, adapted.view.values())}
    values, trainee, batch = drawn(adapted.view), adapted.trainable.trainee, batch_of(adapted.trainable)
    for name, part in adapted.view.items():
        part.data.copy_(values[name])
    trainee(batch).total.backward()
    length = sum(float(part.grad.square().sum()) for part in adapted.view.values()) ** 0.5
    sides = []
    for side in (1e-2, -1e-2):
        for name, part in adapted.view.items():
            part.data.copy_(values[name] + side / length * part.grad)
        with torch.no_grad():
            sides.append(trainee(batch).total.item())
    assert (sides[0] - sides[1]) / 2e-2 == pytest.approx(length, rel=0.1)
    assert all(re.fullmatch(r"[\w.]+\.(scale|shift|a|b)", name) for name in adapted.view)


def test_a_trained_adapter_is_loaded_as_it_was_trained(tmp_path):
    adapted = opened("pi05", "view-lora")
    run(adapted, tmp_path / "run", 3, learning_rate=0.05)
    write_view(tmp_path / VIEW_FILE, "view-lora", base_digest(adapted.trainable.stored), adapted.view)
    folder, settings = OPTIONS["pi05"]
    checkpoint = policy_of(folder, *settings, f"policy.view:={tmp_path / VIEW_FILE}")._open(CPU)
    from vla_ros_models.pi.training import make_trainable

    again = make_trainable(checkpoint, "cpu", "float32", recompute_layers=False)
    batch = batch_of(again)
    with torch.no_grad():
        trained, loaded = (one.trainee(batch).total.item() for one in (adapted.trainable, again))
    assert loaded == pytest.approx(trained, rel=1e-6)


def test_the_published_sizes():
    """4K numbers for pi0.5's scale and shift and 4.7M for rank 16, as the paper says."""
    tower = "paligemma_with_expert.paligemma.model.vision_tower.vision_model.encoder.layers"
    names = [f"{tower}.{block}.mlp.fc{one}.weight" for block in range(27) for one in (1, 2)]
    names += [f"{tower}.0.self_attn.q_proj.weight", f"{tower}.0.layer_norm1.weight"]
    names += ["paligemma_with_expert.paligemma.model.multi_modal_projector.linear.weight"]
    assert layers_of("view", names) == [names[-1].removesuffix(".weight")]
    assert len(layers_of("view-lora", names)) * 16 * (1152 + 4304) == 4_713_984
    with pytest.raises(ConfigError, match="no such adapter"):
        layers_of("view", ["model.encoder.weight"])


def test_the_published_schedule():
    recipe = view_recipe(recipe_of("pi05", "openpi"), "view")
    assert (recipe.learning_rate, recipe.batch, recipe.steps, recipe.clip) == (5e-4, 32, 5000, 1.0)
    assert recipe.schedule(500, 5000) == 1.0
    assert recipe.schedule(5000, 5000) == pytest.approx(0.1)
    assert recipe.schedule(10, 100) == 1.0  # a short run warms up for as large a share
    lora = view_recipe(recipe_of("pi05", "openpi"), "view-lora")
    assert lora.schedule(2000, 1500) == pytest.approx(0.01)


def test_quantised_weights_are_those_of_the_merged_checkpoint(tmp_path):
    folder, settings = OPTIONS["openvla"]
    file, tensors = written(tmp_path, "openvla", "view")
    words = (*settings, "policy.quantization:=int8")
    merged = chunk_of(policy_of(folder, *words, f"policy.view:={file}"))
    hand = chunk_of(policy_of(by_hand(folder, tmp_path / "hand", tensors), *words))
    np.testing.assert_allclose(merged, hand, atol=0.05)
    assert np.abs(merged - chunk_of(policy_of(folder, *words))).max() > 0.5


def _without(name):
    return lambda tensors, about: tensors.pop(name)


LAYER = "paligemma_with_expert.paligemma.model.multi_modal_projector.linear"
DAMAGES = {
    "missing": (_without(f"{LAYER}.shift"), "1 missing: .*shift"),
    "additional": (lambda tensors, about: tensors.update(more=torch.zeros(1)), "1 unexpected: more"),
    "shape": (lambda tensors, about: tensors.update({f"{LAYER}.scale": torch.ones(3)}), r"\[3\], expected \["),
    "nan": (lambda tensors, about: tensors[f"{LAYER}.shift"].fill_(float("nan")), "NaN or Inf: .*shift"),
    "type": (lambda tensors, about: tensors.update({f"{LAYER}.scale": tensors[f"{LAYER}.scale"].int()}), "I32"),
    "base": (lambda tensors, about: about.update(base="0" * 64), "was trained on weights with the SHA-256 0000"),
    "kind": (lambda tensors, about: about.update(kind="view-lora"), "missing: .*unexpected: "),
    "format": (lambda tensors, about: about.clear(), "expected vla_ros.view.1 with kind"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_does_not_fit_is_refused(tmp_path, damage):
    from safetensors import safe_open

    file, _ = written(tmp_path, "pi05", "view")
    tensors = load_file(file)
    with safe_open(file, "pt") as opened_file:
        about = json.loads(opened_file.metadata()[FORMAT])
    change, told = DAMAGES[damage]
    change(tensors, about)
    save_file(tensors, file, metadata={FORMAT: json.dumps(about)})
    with pytest.raises(CheckpointError, match=told) as caught:
        policy_of(OPTIONS["pi05"][0], f"policy.view:={file}").load()
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 100])
def test_a_file_that_is_none_is_refused(tmp_path, content):
    file = tmp_path / VIEW_FILE
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(str(file))):
        policy_of(OPTIONS["pi05"][0], f"policy.view:={file}").load()


def test_another_checkpoint_of_the_same_sizes_is_refused(tmp_path):
    file, _ = written(tmp_path, "pi05", "view")
    other = tmp_path / "other"
    shutil.copytree(OPTIONS["pi05"][0], other)
    path = other / "model.safetensors"
    save_file({name: one * 1.001 for name, one in load_file(path).items()}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="was trained on weights"):
        policy_of(other, f"policy.view:={file}").load()


def test_options_that_an_adapter_fixes_are_refused():
    with pytest.raises(ConfigError, match="--targets"):
        opened("pi05", "view", targets="x")


def test_the_base_is_what_sha256sum_says(tmp_path):
    """So that anybody can check whose adapter it is: sha256sum of the files of weights, and of that list."""
    import hashlib

    trainable = policy_of(OPTIONS["openvla"][0], *OPTIONS["openvla"][1]).trainable(CPU)
    lines = [f"{sha256(file)}  {file.name}\n" for file in sorted(Path(OPTIONS["openvla"][0]).glob("*.safetensors"))]
    assert base_digest(trainable.stored) == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_a_policy_behind_a_server_is_named_too(tmp_path):
    spec = replace(policy_of(OPTIONS["pi05"][0]).describe(), view="ab" * 32)
    assert decode_spec(encode_spec("pi", spec)).view == "ab" * 32


def test_evidence_is_that_of_the_adapter(tmp_path):
    file, _ = written(tmp_path, "pi05", "view")
    policy = policy_of(OPTIONS["pi05"][0], f"policy.view:={file}", "policy.evidence:=require")
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "evidence"))):
        policy.load()
