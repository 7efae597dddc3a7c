"""Options that no longer exist, and what to write instead."""

from vla_ros.config import node_topics

_TOPICS = [topic for name, topic in vars(node_topics).items() if name.isupper()]

REMOVED = {
    **{
        "topics." + topic.rpartition("/")[2]: f"the topic is {topic}; to rename it: --ros-args -r {topic}:=/other"
        for topic in _TOPICS
    },
    "policy.max_instruction_length": "instructions have at most 500 characters; leave it out",
    "takeover.deadzone": "axes of the Joy nearer to 0 than 0.1 are 0; set the driver's own (joy: deadzone)",
    "takeover.rate_hz": "a person's steps have 50 Hz; leave it out",
    "collision.fingertips": "the links that joints after the arm's last one move are the fingertips; leave it out",
}
"""By flat name: why it needs no option, or what sets it."""
