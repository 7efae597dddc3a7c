"""Training the demo's checkpoint: demonstrations, a small OpenVLA from scratch, export, evaluation.

Run it as ``python -m tools.train``; ``docs/demo-policy.md`` explains the method.
"""
