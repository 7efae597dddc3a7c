"""Trains the demo's checkpoint from scratch; ``docs/demo-policy.md`` explains the method."""
