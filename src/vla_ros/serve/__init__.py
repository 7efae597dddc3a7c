"""A policy server for many robots, behind openpi's websocket.

``worker`` is the one thread that infers, in batches; ``wire`` reads requests and writes answers; ``service`` holds
one conversation with each robot, whatever carries it; ``server`` carries it over a websocket of its own.
"""
