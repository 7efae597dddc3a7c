"""The robot's house: its commands."""

from vla_ros.cli.doctor import examine
from vla_ros.houses import House, SubCommand

HOUSE = House(
    "the robot",
    {
        "init": SubCommand("vla_ros.cli.init", "write the configuration of a new arm from its URDF"),
        "run": SubCommand("vla_ros.node.run", "run a policy as a node on the ROS 2 graph"),
        "infer": SubCommand("vla_ros.node.infer", "ask a policy about one observation from files"),
        "serve": SubCommand("vla_ros.serve.cli", "serve a policy to robots on other machines"),
        "record": SubCommand("vla_ros.record.cli", "record a running node as bags, or repair bags"),
        "status": SubCommand("vla_ros.cli.operate", "show the state of every node, and why"),
        "stop": SubCommand("vla_ros.cli.operate", "stop every node until a reset"),
        "arm": SubCommand("vla_ros.cli.operate", "let a node move its robot"),
        "disarm": SubCommand("vla_ros.cli.operate", "disarm every node"),
        "reset": SubCommand("vla_ros.cli.operate", "end a node's stop"),
        "instruct": SubCommand("vla_ros.cli.operate", "give a node another instruction"),
        "console": SubCommand("vla_ros.console.cli", "operate nodes in the browser"),
        "top": SubCommand("vla_ros.cli.top", "watch a running policy node in the terminal"),
        "teach": SubCommand("vla_ros.cli.teach", "take over by keyboard, and label episodes"),
        "doctor": SubCommand("vla_ros.cli.doctor", "show what is installed, what is wrong and what fixes it"),
        "middleware": SubCommand(
            "vla_ros.middleware.cli", "print, write or check middleware profiles for large camera frames"
        ),
        "config": SubCommand("vla_ros.config.show", "print every option with unit, range and description"),
    },
    examine,
)
