"""Fault injection: the real node in one process, a misbehaving robot in another, a judge in a third.

``python -m tools.faults`` runs the whole table (``make faults``). :mod:`~tools.faults.rows` defines the faults and
the required reactions. :mod:`~tools.faults.judge` checks the invariants on the robot's side of the wire, so nothing
that the node reports about itself can hide a violation.
"""
