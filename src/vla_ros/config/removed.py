"""Options that no longer exist, and what to write instead."""

from vla_ros.config import node_topics

_TOPICS = {name.lower(): topic for name, topic in vars(node_topics).items() if name.isupper()}

REMOVED = {
    **{
        f"topics.{name}": f"the topic is {topic}; another name is a remap: --ros-args -r {topic}:=/other"
        for name, topic in _TOPICS.items()
    },
    "policy.max_instruction_length": "instructions have at most 500 characters; leave it out",
    "takeover.deadzone": "axes of the Joy nearer to 0 than 0.1 are 0; set the driver's own (joy: deadzone)",
    "takeover.rate_hz": "a person's steps have 50 Hz; leave it out",
    "collision.fingertips": "the links that joints after the arm's last one move are the fingertips; leave it out",
}
"""By flat name: why it needs no option, or what sets it."""
