"""Writes the model card from the recorded facts."""

from collections.abc import Mapping
from typing import Any

from tools.train.controls import markdown
from tools.train.recipe import (
    DATASET,
    FOREIGN_DATASET,
    DataRecipe,
    FitRecipe,
    FlowNetworkRecipe,
    LabelRecipe,
    NetworkRecipe,
    as_json,
)

_LIMITS = """\
- It knows one simulated table, one camera pose, one arm, four colours, three shapes and the instructions above. It
  has never seen a real image and must not be run on a real robot.
- Brightness, contrast and tint were varied in training; the camera pose, the image size and the crop were not.
- It uses one image at a time, no proprioception and no memory.
- Objects rarely lie on their side in training: a cylinder that was knocked over may not be picked up.
"""


def command(facts: Mapping[str, Any]) -> str:
    """Return the commands that train the checkpoint again; options with default values are omitted."""
    data = _options(facts["data"], as_json(DataRecipe()))
    fit = _options(
        {**facts["network"], **facts["labels"], **facts["fit"]},
        {**as_json(NetworkRecipe()), **as_json(LabelRecipe()), **as_json(FitRecipe())},
    )
    dtype = "" if facts["dtype"] == "float16" else f" --dtype {facts['dtype']}"
    return (
        f"python -m tools.train data work/data{data}\n"
        f"python -m tools.train fit work/data work/run{fit}\n"
        f"python -m tools.train export work/run work/checkpoint{dtype}\n"
        "python -m tools.train evaluate work/checkpoint work/scores\n"
    )


def _options(values: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    words = []
    for name, value in values.items():
        if value != usual[name]:
            text = " ".join(str(item) for item in value) if isinstance(value, list) else str(value)
            words.append(f" --{name.replace('_', '-')} {text}")
    return "".join(words)


def model_card(facts: Mapping[str, Any]) -> str:
    data, fit, labels = facts["data"], facts["fit"], facts["labels"]
    frames = fit["batch"] * fit["accumulate"] * facts["steps_done"]
    evaluation = facts.get("evaluation") or []
    table = markdown(evaluation) if evaluation else "Not evaluated yet.\n"
    seeds = f"{data['seed']} to {data['seed'] + data['episodes'] - 1}"
    unfinished = "" if facts["steps_done"] >= fit["steps"] else f" of {fit['steps']} (unfinished)"
    return f"""# A small OpenVLA for the simulated table

{facts["parameters"] / 1e6:.1f} million parameters in OpenVLA's architecture and file layout, trained from random
weights on demonstrations of the scripted expert of `vla_ros`. Apache-2.0, weights included. No pre-trained weights
were used.

- **Use**: `vla-ros demo --checkpoint DIR -p policy.unnorm_key:={DATASET}`; plain `vla-ros demo` runs the one that
  comes with the package
- **Instructions**: "pick up the (red, green, blue, yellow) (cube, cylinder, ball)"{_pushes(data["tasks"])}
- **Image**: the front camera, upright, 224 x 224, no crop
- **Action**: {DATASET}, end-effector deltas in the base frame at 10 Hz; gripper 1 opens, {labels["closed_value"]:g}
  closes

The gripper value works like an analog trigger: {labels["closed_value"]:g} closes, so `gripper.mode: binary` and
`gripper.threshold: 0.85` are needed. Taken literally (`continuous`) it leaves the hand wider open than any object.

`norm_stats` has two entries. `{DATASET}` belongs to the tokens. `{FOREIGN_DATASET}` does not: it has the
percentiles of RT-1's robot data from openvla-7b, to show the effect of a wrong `unnorm_key`. With it the same
tokens mean motions seven times as wide, and standing still becomes 2 cm back and 0.12 rad about x in every step.

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

On held-out episodes, during training:

{_curve(facts.get("curve", []))}
## Evaluation

Seeds below {data["seed"]}, so no scene of the training data. Success: the named object is lifted by 8 cm within 80
steps.

{table}
## Limits

{_LIMITS}"""


def flow_card(facts: Mapping[str, Any], curve: list[dict[str, Any]]) -> str:
    """Return the text of the small pi0.5's ``README.md``; ``facts`` are the content of ``training.json``."""
    data, fit, network = facts["data"], facts["fit"], facts["network"]
    options = _options(
        {name: value for name, value in {**network, **fit}.items() if name != "steps"},
        {**as_json(FlowNetworkRecipe()), **as_json(FitRecipe())},
    )
    frames = fit["batch"] * fit["accumulate"] * facts["steps_done"]
    return f"""# A small pi0.5 for the simulated table

{facts["parameters"] / 1e6:.1f} million parameters in pi0.5's architecture and LeRobot's file layout, trained by
flow matching on demonstrations of the scripted expert of `vla_ros`. Apache-2.0, weights included. No pre-trained
weights were used.

- **Use**: `vla-ros demo --policy pi --checkpoint DIR`; `vla-ros demo --checkpoint demo-pi` runs the one that comes
  with the package
- **Instructions**: "pick up the (red, green, blue, yellow) (cube, cylinder, ball)"{_pushes(data["tasks"])}
- **Image**: the front camera, upright, 224 x 224
- **State**: seven joint positions (rad) and the gripper's opening (0 to 1), as numbers in the prompt
- **Action**: chunks of {data["horizon"]} steps at {data["rate_hz"]:g} Hz, joint positions (relative to the state
  in the network) and gripper; 1 opens
- **Real-time chunking**: trained for up to {network["max_delay"]} given actions

## Training

| | |
| --- | --- |
| demonstrations | {data["episodes"]} episodes, seeds {data["seed"]} to {data["seed"] + data["episodes"] - 1} |
| steps | {facts["steps_done"]} |
| frames | {frames}, with {fit["prompts"]} instructions and {fit["samples"]} noises each |
| time | {facts["seconds"]:.0f} s |
| stored as | float16 |

```
python -m tools.train data work/chunks{_options(data, as_json(DataRecipe()))}
python -m tools.train fit-flow work/chunks work/flow{options}
python -m tools.train export-flow work/flow work/pi
```
{facts["note"]}
On held-out episodes, during training (`first`, `middle` and `last`: mean joint error of three steps of a sampled
chunk, milliradians, over all instructions):

{_curve(curve)}
## Limits

It knows one simulated table, one camera pose and one arm. It has never seen a real image and must not be run on a
real robot. Success under each schedule and control: `docs/chunks.md` and `docs/demo-policy.md`.
"""


def _curve(rows: list[dict[str, Any]]) -> str:
    """Return a table of the 1st, 2nd, 4th, 8th... and last evaluation during training."""
    if not rows:
        return "None recorded.\n"
    chosen = [each for number, each in enumerate(rows, 1) if number & (number - 1) == 0]
    chosen += [] if chosen[-1] is rows[-1] else [rows[-1]]
    names = list(rows[-1])
    lines = [[name.replace("_", " ") for name in names], ["---"] * len(names)]
    lines += [[f"{each[name]:.4g}" if name != "step" else str(each[name]) for name in names] for each in chosen]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _pushes(tasks: list[str]) -> str:
    sides = [task.removeprefix("push_") for task in tasks if task.startswith("push_")]
    return f'; "push the ... to the {" or ".join(sides)}"' if sides else ""
