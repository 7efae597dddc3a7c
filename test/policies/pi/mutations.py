"""Changes of LeRobot's pi folders, each either obeyed as by LeRobot or refused with the key's name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

CONFIG, BEFORE, AFTER = "config.json", "policy_preprocessor.json", "policy_postprocessor.json"
IMAGES = "observation.images"
Change = Callable[[Any], Any]


class Mutation(NamedTuple):
    """A change of one file; ``refused`` is what the message names, empty if the change is obeyed."""

    file: str
    change: Change
    refused: str = ""


def config(**values: Any) -> Change:
    return lambda content: content.update(values)


def step(content: Any, name: str) -> Any:
    return next(one for one in content["steps"] if one["registry_name"].startswith(name))


def options(name: str, **values: Any) -> Change:
    return lambda content: step(content, name)["config"].update(values)


def modes(name: str, **values: Any) -> Change:
    return lambda content: step(content, name)["config"]["norm_map"].update(values)


def without(name: str) -> Change:
    return lambda content: content["steps"].remove(step(content, name))


def moved(name: str, place: int) -> Change:
    def change(content: Any) -> None:
        found = step(content, name)
        content["steps"].remove(found)
        content["steps"].insert(place, found)

    return change


def repeated(name: str) -> Change:
    return lambda content: content["steps"].insert(0, step(content, name))


def feature(name: str, **values: Any) -> Change:
    return lambda content: step(content, "normalizer")["config"]["features"][name].update(values)


def unlisted(name: str) -> Change:
    return lambda content: step(content, "normalizer")["config"]["features"].pop(name)


MUTATIONS = {
    # obeyed
    "": Mutation(CONFIG, config()),
    "min_period": Mutation(CONFIG, config(min_period=0.02)),
    "max_period": Mutation(CONFIG, config(max_period=2.0)),
    "num_inference_steps": Mutation(CONFIG, config(num_inference_steps=4)),
    "n_action_steps": Mutation(CONFIG, config(n_action_steps=4)),
    "training": Mutation(CONFIG, config(optimizer_lr=1.0, train_expert_only=True, time_sampling_scale=0.5)),
    "repeated values": Mutation(
        CONFIG, config(tokenizer_max_length=7, normalization_mapping={"STATE": "MEAN_STD"})
    ),
    "two observations": Mutation(CONFIG, config(n_obs_steps=2)),
    "empty camera": Mutation(CONFIG, config(empty_cameras=1)),
    "swapped cameras": Mutation(
        BEFORE,
        options(
            "rename", rename_map={f"{IMAGES}.image": f"{IMAGES}.image2", f"{IMAGES}.image2": f"{IMAGES}.image"}
        ),
    ),
    # a fine-tuned checkpoint has the shapes of its base model, which LeRobot does not read
    "shapes of the base model": Mutation(
        CONFIG,
        lambda c: (
            [c["input_features"]["observation.state"].update(shape=[32])]
            + [c["input_features"][f"{IMAGES}.{name}"].update(shape=[256, 256, 3]) for name in ("image", "image2")]
        ),
    ),
    "no state feature": Mutation(CONFIG, lambda c: c["input_features"].pop("observation.state")),
    "camera of the base model": Mutation(
        CONFIG, lambda c: c["input_features"].update({f"{IMAGES}.camera3": {"type": "VISUAL", "shape": [3, 8, 8]}})
    ),
    "eps": Mutation(BEFORE, options("normalizer", eps=0.3)),
    "eps and MEAN_STD": Mutation(
        BEFORE, lambda c: (modes("normalizer", STATE="MEAN_STD")(c), options("normalizer", eps=0.3)(c))
    ),
    "eps of actions": Mutation(AFTER, options("unnormalizer", eps=0.3)),
    "state MEAN_STD": Mutation(BEFORE, modes("normalizer", STATE="MEAN_STD")),
    "state MIN_MAX": Mutation(BEFORE, modes("normalizer", STATE="MIN_MAX")),
    "state IDENTITY": Mutation(BEFORE, modes("normalizer", STATE="IDENTITY")),
    "actions MEAN_STD": Mutation(AFTER, modes("unnormalizer", ACTION="MEAN_STD")),
    "actions MIN_MAX": Mutation(AFTER, modes("unnormalizer", ACTION="MIN_MAX")),
    "actions QUANTILES": Mutation(AFTER, modes("unnormalizer", ACTION="QUANTILES")),
    "no observation key": Mutation(BEFORE, options("normalizer", normalize_observation_keys=[])),
    "the state's key": Mutation(BEFORE, options("normalizer", normalize_observation_keys=["observation.state"])),
    "state unlisted": Mutation(BEFORE, unlisted("observation.state")),
    "state as ENV": Mutation(BEFORE, feature("observation.state", type="ENV")),
    "action unlisted": Mutation(AFTER, lambda c: step(c, "unnormalizer")["config"].update(features={})),
    "image as ENV": Mutation(BEFORE, feature(f"{IMAGES}.image", type="ENV")),
    "max_length": Mutation(BEFORE, options("tokenizer_processor", max_length=5)),
    "long max_length": Mutation(BEFORE, options("tokenizer_processor", max_length=300)),
    "no max_length": Mutation(BEFORE, lambda c: step(c, "tokenizer_processor")["config"].pop("max_length")),
    "padding": Mutation(BEFORE, options("tokenizer_processor", padding="longest")),
    "padding_side": Mutation(BEFORE, options("tokenizer_processor", padding_side="left")),
    "no batch step": Mutation(BEFORE, moved("to_batch", -1)),
    "device first": Mutation(BEFORE, moved("device", 0)),
    # obeyed or refused
    "VISUAL": Mutation(BEFORE, modes("normalizer", VISUAL="MEAN_STD"), "VISUAL"),
    "image as STATE": Mutation(BEFORE, feature(f"{IMAGES}.image", type="STATE"), f"{IMAGES}.image"),
    "norm_map": Mutation(BEFORE, modes("normalizer", STATE="MEDIAN"), "STATE"),
    "another type": Mutation(BEFORE, feature("observation.state", type="STATES"), "'observation.state': 'STATES'"),
    "no norm_map": Mutation(
        BEFORE, lambda c: step(c, "normalizer")["config"].pop("norm_map"), "norm_map: found None"
    ),
    "no state_file": Mutation(BEFORE, lambda c: step(c, "normalizer").pop("state_file"), "state_file"),
    "another padding": Mutation(BEFORE, options("tokenizer_processor", padding="bucket"), "padding"),
    "truncation": Mutation(BEFORE, options("tokenizer_processor", max_length=9, truncation=False), "truncation"),
    "task_key": Mutation(BEFORE, options("tokenizer_processor", task_key="subtask"), "task_key"),
    "tokenizer_name": Mutation(
        BEFORE,
        lambda c: (
            step(c, "tokenizer_processor")["config"].update(tokenizer_name="google/gemma-2b"),
            step(c, "tokenizer_processor").pop("artifacts", 0),
        ),
        "tokenizer_name",
    ),
    "float_dtype": Mutation(BEFORE, options("device", float_dtype="bfloat16"), "float_dtype"),
    "stats": Mutation(
        BEFORE, options("normalizer", stats={"observation.state": {"mean": [0.0] * 8, "std": [1.0] * 8}}), "stats"
    ),
    "order": Mutation(BEFORE, moved("tokenizer_processor", 0), "tokenizer_processor"),
    "rename last": Mutation(BEFORE, moved("rename", -1), "rename_observations_processor"),
    "repeated step": Mutation(BEFORE, repeated("normalizer"), "normalizer_processor"),
    "renamed away": Mutation(
        BEFORE, options("rename", rename_map={f"{IMAGES}.image": "observation.images.other"}), "rename_map"
    ),
    "no normalizer": Mutation(BEFORE, without("normalizer"), "normalizer_processor"),
    "no unnormalizer": Mutation(AFTER, without("unnormalizer"), "unnormalizer_processor"),
    "no tokenizer": Mutation(BEFORE, without("tokenizer_processor"), "tokenizer_processor"),
    "absolute alone": Mutation(AFTER, options("absolute", enabled=True), "absolute_actions_processor"),
    "step of another file": Mutation(
        BEFORE, lambda c: c["steps"].append({"registry_name": "absolute_actions_processor"}), "absolute_actions"
    ),
    "unknown step": Mutation(BEFORE, lambda c: c["steps"].append({"class": "mine.Blur"}), "mine.Blur"),
    "unknown option of a step": Mutation(BEFORE, options("normalizer", clip=5.0), "clip"),
    "unknown option, off": Mutation(BEFORE, options("device", pin_memory=False), "pin_memory"),
    "unknown key of a step": Mutation(BEFORE, lambda c: step(c, "device").update(when="train"), "when"),
    "unknown key": Mutation(CONFIG, config(action_smoothing=0.5), "action_smoothing"),
    "use_visual_memory": Mutation(CONFIG, config(use_visual_memory=True), "use_visual_memory"),
    "a feature's key": Mutation(
        CONFIG, lambda c: c["input_features"]["observation.state"].update(unit="deg"), "unit"
    ),
    "a feature's type": Mutation(
        CONFIG, lambda c: c["input_features"][f"{IMAGES}.image"].update(type="PHOTO"), "type: found 'PHOTO'"
    ),
    "no type": Mutation(CONFIG, lambda c: c["output_features"]["action"].pop("type"), "action has no type"),
    "use_peft": Mutation(CONFIG, config(use_peft=True), "use_peft"),
    "paligemma_variant": Mutation(CONFIG, config(paligemma_variant="gemma_300m"), "paligemma_variant"),
    "max_action_dim": Mutation(CONFIG, config(max_action_dim=16), "max_action_dim"),
    "image_resolution": Mutation(CONFIG, config(image_resolution=[112, 112]), "image_resolution"),
    "use_relative_actions": Mutation(CONFIG, config(use_relative_actions=True), "use_relative_actions"),
}

OF_ONE_MODEL: dict[str, dict[str, Mutation]] = {
    "pi05": {
        "no state step": Mutation(BEFORE, without("pi05_prepare")),
        "state step first": Mutation(BEFORE, moved("pi05_prepare", 0), "pi05_prepare_state"),
        "no state in the prompt": Mutation(
            BEFORE, options("pi05_prepare", include_state_in_prompt=False), "include_state_in_prompt"
        ),
    },
    "pi0": {
        "no new line": Mutation(BEFORE, without("pi0_new_line")),
        "new line after": Mutation(BEFORE, moved("pi0_new_line", -1), "pi0_new_line_processor"),
        "max_state_dim": Mutation(CONFIG, config(max_state_dim=16), "max_state_dim"),
    },
}

CASES = [
    (kind, name, mutation)
    for kind, own in OF_ONE_MODEL.items()
    for name, mutation in {**MUTATIONS, **own}.items()
    if kind == "pi05" or name in own or not mutation.refused  # what both refuse is tried with one
]

RECORDED = {"pi0": 1, "pi05": 0}
"""The case of LeRobot's recorded answers whose inputs are used, by model."""


def mutate(folder: Path, mutation: Mutation) -> None:
    """Change a folder's file."""
    path = folder / mutation.file
    content = json.loads(path.read_text())
    mutation.change(content)
    path.write_text(json.dumps(content))
