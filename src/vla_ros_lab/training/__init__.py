"""Training: recordings through the contract, one trainer, and the proof that a policy became better."""
