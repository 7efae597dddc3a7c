"""What the node reports about itself: diagnostics, status, metrics, trace, debug image."""
