"""Exports recorded bags as training data sets."""
