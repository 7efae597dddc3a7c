"""The operator's page in the browser, served by a process of its own.

The process is a client of the node's topics and services, as ``vla-ros stop`` and ``vla-ros teach`` are: killed,
hung or flooded, it changes nothing at the node. ``admission`` decides which request of a page counts, ``panel``
watches the nodes and acts on the thread that spins the graph, ``server`` talks to the pages on another.
"""
