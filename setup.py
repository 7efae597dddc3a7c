"""Build description of the ament_python package ``vla_ros`` (colcon and pip)."""

import os
import sys
from glob import glob
from pathlib import Path

from setuptools import find_packages, setup

NAME = "vla_ros"

DDS = [
    "rosbags>=0.11",
    "cyclonedds>=11.0.1; python_version < '3.14' and platform_machine == 'x86_64'",
]
VISION = ["simplejpeg>=1.9", "opencv-python-headless>=4.10"]
KINEMATICS = ["pin>=2.7"]  # 2.7 is the last for NumPy 1, which the binaries of Humble and Jazzy need
SIM = ["mujoco>=3.3"]
OPENVLA = ["torch>=2.6", "safetensors>=0.5", "tokenizers>=0.21", "sentencepiece>=0.2"]
REPLAY = ["rosbags>=0.11", "mcap>=1.2"]
EXPORT = ["pyarrow>=15", "av>=14"]
LEROBOT = ["lerobot>=0.6.1,<0.7; python_version >= '3.12'"]  # 0.7 is announced to change inference
METRICS = ["prometheus-client>=0.9"]  # 0.9 is what Ubuntu 22.04 has
REMOTE = ["websockets>=15", "msgpack>=1.1", "pyzmq>=26"]  # 15 is the first whose blocking client sends pings
SERVE = ["websockets>=15", "msgpack>=1.1", *METRICS]
CONSOLE = ["uvicorn>=0.35", "starlette>=0.46", "websockets>=15"]
RAY = ["ray[serve]>=2.40", *SERVE]
TRAIN = [
    "accelerate>=1.2",
    "peft>=0.15",
    "transformers>=4.53",  # its schedules
    "bitsandbytes>=0.46; sys_platform == 'linux' and platform_machine in 'x86_64 aarch64'",
    "tensorboard>=2.16",
    *EXPORT,
]
BENCH = ["transformers>=4.53"]  # what the engine and the prompt are compared with, never what runs a policy
TRITON = (
    "triton>=3.5; sys_platform == 'linux' and platform_machine in 'x86_64 aarch64'"  # comes with torch for CUDA
)
DEV = [
    *BENCH,
    *TRAIN,
    "mkdocs>=1.6",  # the site of docs/
    "vla-eval>=0.8",  # drives `vla-ros serve` and `vla-ros eval` from its own side
    TRITON,  # its interpreter and compiler test the kernels without a GPU
    "pytest>=8.3",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "hypothesis>=6.120",
    "ruff>=0.9",
    "mypy>=1.14",
    "types-PyYAML",
]

# colcon may belong to another Python than the libraries: the programs it installs get the active environment's.
ENVIRONMENT = Path(os.environ.get("VIRTUAL_ENV", sys.prefix)) / "bin" / "python"
INTERPRETER = str(ENVIRONMENT) if ENVIRONMENT.exists() else sys.executable

ALL = [*DDS, *VISION, *KINEMATICS, *SIM, *OPENVLA, *REPLAY, *METRICS, *REMOTE, *SERVE, *CONSOLE, *EXPORT]

setup(
    name=NAME,
    version="0.1.0",
    description="Runs Vision-Language-Action policies on real robots: camera frames in, safe joint commands out.",
    # `colcon build --symlink-install` runs a link to this file in another folder.
    long_description=(Path(__file__).resolve().parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    maintainer="vla_ros maintainers",
    maintainer_email="maintainers@vla-ros.example",
    python_requires=">=3.10",
    package_dir={"": "src"},
    packages=find_packages("src"),
    package_data={
        NAME: [
            "py.typed",
            "config/presets/*.yaml",
            "kinematics/*.urdf",
            "middleware/templates/*",
            "console/page.*",
        ],
        "vla_ros_models": ["py.typed", "*/demo_checkpoint/*"],
        "vla_ros_lab": ["py.typed", "eval/*.yaml", "report/*.css", "sim/assets/*"],
    },
    data_files=[
        ("share/ament_index/resource_index/packages", ["resource/vla_ros"]),
        ("share/vla_ros", ["package.xml"]),
        ("share/vla_ros/hook", ["hook/path.dsv", "hook/path.sh"]),
        ("share/vla_ros/launch", sorted(glob("launch/*.launch.py"))),
        ("share/vla_ros/config", sorted(path for path in glob("config/*") if "." in path)),
        ("share/vla_ros/config/robots", sorted(glob("config/robots/*.yaml"))),
    ],
    zip_safe=False,
    options={"build_scripts": {"executable": INTERPRETER}},
    install_requires=["numpy>=1.26", "PyYAML>=6.0", "rich>=13.9", "Pillow>=10.3", *VISION, *KINEMATICS],
    extras_require={
        "dds": DDS,
        "sim": SIM,
        **dict.fromkeys(("openvla", "oft", "pi", "smolvla", "groot"), OPENVLA),
        "replay": REPLAY,
        "train": [*OPENVLA, *REPLAY, *TRAIN],
        "lerobot": LEROBOT,
        "export": [*REPLAY, *EXPORT],
        "metrics": METRICS,
        "remote": REMOTE,
        "serve": SERVE,
        "console": CONSOLE,
        "ray": RAY,
        "bench": BENCH,
        "dev": DEV,
        "robots": ["example-robot-data>=4.3"],  # 130 MB; URDFs of real arms for the tests
        "test": DEV,  # where colcon looks to choose pytest
        "all": ALL,
    },
    entry_points={
        "console_scripts": [
            "vla-ros = vla_ros.cli.main:main",
            "vla_policy_node = vla_ros.node.lifecycle_main:main",
        ],
        "vla_ros.houses": [
            "robot = vla_ros.cli.house:HOUSE",
            "models = vla_ros_models.house:HOUSE",
            "laboratory = vla_ros_lab.house:HOUSE",
        ],
        "vla_ros.policies": [
            "lerobot = vla_ros_models.lerobot:LEROBOT",
            "remote = vla_ros.policies.remote:REMOTE",
            "openvla = vla_ros_models.openvla:OPENVLA",
            "oft = vla_ros_models.oft:OFT",
            "pi = vla_ros_models.pi:PI",
            "groot = vla_ros_models.groot:GROOT",
            "smolvla = vla_ros_models.smolvla:SMOLVLA",
            "expert = vla_ros_lab.sim.expert:ExpertPolicy",
            "hold = vla_ros.policies.hold:HoldPolicy",
            "wiggle = vla_ros.policies.wiggle:WigglePolicy",
        ],
    },
)
