"""Evaluates a policy on recorded bags, through the same code that runs live."""
