"""A small pi0.5 for five tasks of LIBERO: demonstrations, training, scores."""
