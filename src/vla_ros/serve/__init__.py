"""A policy server for many robots, speaking openpi's websocket protocol.

``worker`` is the only thread that infers, in batches. ``wire`` reads requests and writes answers. ``service`` holds
one conversation with each robot, over any transport; ``server`` is the websocket transport.
"""
