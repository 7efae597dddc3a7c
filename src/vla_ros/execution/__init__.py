"""Steps on their way to the drivers: who proposes actions, what executes them, and who else commands the arm."""
