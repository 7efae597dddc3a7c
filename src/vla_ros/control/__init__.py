"""Decides which commands may reach the arm, and when."""
