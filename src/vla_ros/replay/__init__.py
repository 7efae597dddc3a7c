"""Recorded bags in, metrics and a report out, through the very path that runs live."""
