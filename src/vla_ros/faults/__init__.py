"""Fault injection: the real node in one process, a robot that misbehaves in another, a judge in a third.

``python -m vla_ros.faults`` runs the whole table (``make faults``). :mod:`~vla_ros.faults.rows` says what is
injected and what must follow, :mod:`~vla_ros.faults.judge` holds the invariants, which are measured on the robot's
side of the wire: nothing that the node says about itself can make a violation go away.
"""
