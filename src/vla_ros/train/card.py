"""The model card, written from what was recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vla_ros.train.figures import markdown
from vla_ros.train.recipe import (
    DATASET,
    SLOW_DATASET,
    DataRecipe,
    FitRecipe,
    LabelRecipe,
    NetworkRecipe,
    as_json,
)

_LIMITS = """\
- It knows one simulated table, one camera pose, one arm, four colours, three shapes and the sentences above. It has
  never seen a real picture and must not be run on a real robot.
- Light, contrast and tint were varied in training; the camera's place, the picture's size and the crop were not.
- It looks at one picture at a time, has no proprioception and no memory.
"""


def command(facts: Mapping[str, Any]) -> str:
    """The commands that make the checkpoint again; options at their defaults are left out."""
    data = _options(facts["data"], as_json(DataRecipe()))
    fit = _options(
        {**facts["network"], **facts["labels"], **facts["fit"]},
        {**as_json(NetworkRecipe()), **as_json(LabelRecipe()), **as_json(FitRecipe())},
    )
    dtype = "" if facts["dtype"] == "float16" else f" --dtype {facts['dtype']}"
    return (
        f"vla-ros train-demo data work/data{data}\n"
        f"vla-ros train-demo fit work/data work/run{fit}\n"
        f"vla-ros train-demo export work/run work/checkpoint{dtype}\n"
        "vla-ros train-demo evaluate work/checkpoint\n"
    )


def _options(values: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    words = []
    for name, value in values.items():
        if value != usual[name]:
            text = " ".join(str(item) for item in value) if isinstance(value, list) else str(value)
            words.append(f" --{name.replace('_', '-')} {text}")
    return "".join(words)


def model_card(facts: Mapping[str, Any]) -> str:
    """The text of ``README.md``.

    Args:
        facts: Content of ``training.json``.
    """
    data, fit, labels = facts["data"], facts["fit"], facts["labels"]
    frames = fit["batch"] * fit["accumulate"] * facts["steps_done"]
    held_out = facts["held_out"]
    figures = "\n".join(
        f"| {name.replace('_', ' ')} | {value:g} |"
        for name, value in held_out.items()
        if isinstance(value, (int, float)) and name != "step"
    )
    measured = f"| on held-out episodes | |\n| --- | --- |\n{figures}\n" if figures else "None recorded.\n"
    evaluation = facts.get("evaluation") or []
    table = markdown(evaluation) if evaluation else "Not evaluated yet.\n"
    seeds = f"{data['seed']} to {data['seed'] + data['episodes'] - 1}"
    unfinished = "" if facts["steps_done"] >= fit["steps"] else f" of {fit['steps']} (unfinished)"
    return f"""# A small OpenVLA for the simulated table

{facts["parameters"] / 1e6:.1f} million parameters in OpenVLA's architecture and file layout, trained from random
weights on demonstrations of the scripted expert of `vla_ros`. Apache-2.0, weights included. Nothing pre-trained
went into it.

- **Use**: `vla-ros demo --policy openvla --checkpoint DIR -p policy.unnorm_key:={DATASET}`
- **Words**: "pick up the (red, green, blue, yellow) (cube, cylinder, ball)"{_pushes(data["tasks"])}
- **Picture**: the front camera, upright, 224 x 224, no crop
- **Action**: {DATASET}, end-effector deltas in the base frame at 10 Hz; gripper 1 opens, {labels["closed_value"]:g}
  closes

The gripper number is read like an analog trigger that is pressed part of the way: the number that closes is
{labels["closed_value"]:g}, so it needs the threshold of `gripper.mode: binary` and `gripper.threshold: 0.85`. Taken
literally (`continuous`) it leaves the hand wider open than any object.

`norm_stats` has two entries. `{DATASET}` belongs to the tokens. `{SLOW_DATASET}` describes the same demonstrations
at a third of the rate, where an action spans three steps: un-normalising with it is the mistake of a wrong
`unnorm_key`.

## Training

| | |
| --- | --- |
| demonstrations | {data["episodes"]} episodes, {facts["frames"]} frames, seeds {seeds} |
| steps | {facts["steps_done"]}{unfinished}, {frames} frames with {fit["prompts"]} instructions each |
| time | {facts["seconds"] / 60:.1f} minutes of training on {facts["device"]} |
| seed of weights and order | {fit["seed"]} |
| versions | {", ".join(f"{name} {version}" for name, version in facts["versions"].items())} |
| stored as | {facts["dtype"]} |

```
{command(facts)}```

{measured}
## Evaluation

Seeds below {data["seed"]}, so no scene of the training. Success: the named object is lifted by 8 cm within 80
steps.

{table}
The draft columns compare each answer's seven tokens with those of the step before: share of equal tokens, mean
number of equal tokens before the first other one, share of answers that are equal in full.

## Limits

{_LIMITS}"""


def _pushes(tasks: list[str]) -> str:
    sides = [task.removeprefix("push_") for task in tasks if task.startswith("push_")]
    return f'; "push the ... to the {" or ".join(sides)}"' if sides else ""
