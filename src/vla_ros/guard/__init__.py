"""A process of its own between the node and the drivers: it checks each command again, sends it, and ends motion.

Read :mod:`~vla_ros.guard.guard` first; it has everything that the process decides.
"""
