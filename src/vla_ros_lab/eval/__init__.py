"""Scores a policy on benchmarks, with the node in the loop."""
