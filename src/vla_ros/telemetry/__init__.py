"""The node's own reports: diagnostics, status, metrics, trace, debug image."""
