from test.policies.groot.conftest import BACKBONE, DATA
from vla_ros.policies.groot import GrootOptions
from vla_ros.policies.groot.loading import load_network, plan_memory, read_checkpoint
from vla_ros.policies.groot.processing import GrootResize


def test_the_plan_counts_the_weights_that_fp8_quantises():
    checkpoint = read_checkpoint(DATA / "two", GrootOptions(backbone=BACKBONE))
    resize, held, planned = GrootResize((96, 96), (86, 86), 96, 0.9), [], []
    for kind in ("none", "fp8"):
        layers = load_network(checkpoint, dtype="bfloat16", quantization=kind).text.layers
        held.append(sum(matrix.data.nbytes for layer in layers for matrix in layer.matrices))
        plan = plan_memory(checkpoint.architecture, "bfloat16", kind, "cpu", cameras=2, resize=resize)
        planned.append(plan.weights)
    assert planned[0] - planned[1] == held[0] - held[1] > 0
