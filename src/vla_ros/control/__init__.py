"""What may reach the arm and when."""
