"""Proves on the simulated table that corrections make a policy better; ``docs/takeover.md`` has the table."""
