"""What the node shows of itself: diagnostics, status, metrics, trace, debug image."""
