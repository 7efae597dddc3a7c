"""Training the demo's checkpoint: demonstrations, a small OpenVLA from scratch, export, evaluation.

``vla-ros train-demo`` is the command; ``docs/demo-policy.md`` tells what it does and why. Nothing here is needed to
run a policy.
"""
