"""A policy server for many robots, speaking openpi's websocket protocol.

``worker`` is the only thread that infers, in batches. ``requests`` checks requests. ``service`` holds
one conversation with each robot, over any transport; ``server`` is the websocket transport.
"""
