"""Commissions an arm: moves each joint slowly, and measures the numbers that safety rests on."""
