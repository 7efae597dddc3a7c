"""A simulated table-top with a 7-joint arm, a scripted expert and the demo."""
