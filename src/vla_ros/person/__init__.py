"""A person takes over: devices in the hand, their actions, the loop that executes them, requests and labels.

``devices`` says what a leader arm, velocities or a hand's pose mean, and whether they are alive; ``source`` makes
actions of their messages; ``loop`` executes these in place of the policy's; ``takeover`` serves the requests and
numbers the episodes. Who may move the arm is decided by :class:`~vla_ros.control.safety.Safety`.
"""
