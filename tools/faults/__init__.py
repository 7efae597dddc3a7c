"""Fault injection: the real node in one process, a robot that misbehaves in another, a judge in a third.

``python -m tools.faults`` runs the whole table (``make faults``). :mod:`~tools.faults.rows` says what is
injected and what must follow, :mod:`~tools.faults.judge` holds the invariants, which are measured on the robot's
side of the wire: nothing that the node says about itself can make a violation go away.
"""
