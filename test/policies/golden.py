"""What the tests of pi, SmolVLA and GR00T share: cases that published code answered, and changes to files."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image

from vla_ros.cli.main import main
from vla_ros.errors import VlaRosError
from vla_ros_models.flow_policy import RealTimeChunk

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here"),
]

IN_FLOAT32 = ("policy.device:=cpu", "policy.dtype:=float32")
"""Options of a policy that is compared with float32 references; by default, an NVIDIA GPU computes in bfloat16."""


@dataclass(frozen=True, eq=False)
class GoldenCase:
    """One observation and what the published code made of it."""

    values: dict

    def __getitem__(self, name):
        return self.values[name]

    @property
    def rtc(self):
        """How the chunk continues a previous one, or None."""
        if not len(self.values.get("previous", ())):
            return None
        end = int(self["execution_horizon"])
        return RealTimeChunk(
            previous=self["previous"],
            delay=int(self["inference_delay"]),
            mode=str(self.values.get("mode", "guided")),
            execution_horizon=end if end >= 0 else int(self["config_execution_horizon"]),
            schedule=str(self["schedule"]),
            max_guidance_weight=float(self["max_guidance_weight"]),
        )


def read_cases(path):
    """The arrays of each case in a file, by their names without the case's number."""
    with np.load(path) as file:
        arrays = {key: file[key] for key in file}
    numbers = sorted({key[:2] for key in arrays})
    return [{key[3:]: value for key, value in arrays.items() if key[:2] == number} for number in numbers]


def answer(model, *requests):
    """The engine's chunks [H, A], each as the network returns it."""
    answers = model.engine.answer(requests)
    for one in answers:
        if isinstance(one, VlaRosError):
            raise one
    return [one.actions for one in answers]


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def eager_and_graphs(model, request):
    """The chunk of a request on a GPU: first without graphs, which are captured meanwhile, then by graphs."""
    [eager] = answer(model, request)
    assert model.engine.wait(120)
    [graph] = answer(model, request)
    np.testing.assert_array_equal(graph, eager)
    return graph


def infer_by_command(folder, out, prompt, images, states, noise, options=()):
    """One chunk in float32 from ``vla-ros infer``, by way of files in the folder ``out``."""
    command = ["infer", "--checkpoint", str(folder), "--instruction", prompt, "--json", str(out / "answer.json")]
    np.save(out / "noise.npy", noise)
    command += ["--noise", str(out / "noise.npy")]
    for number, (key, image) in enumerate(images.items()):
        Image.fromarray(image).save(out / f"{number}.png")
        command += ["--image", f"{key}={out / f'{number}.png'}"]
    for key, state in states.items():
        command += ["--state", f"{key}={','.join(map(repr, state.tolist()))}"]
    for option in (*IN_FLOAT32, "policy.self_test:=false", *options):
        command += ["-p", option]
    assert main(command) == 0
    return json.loads((out / "answer.json").read_text())
