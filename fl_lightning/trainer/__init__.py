"""A run: trainer, rounds, evaluation, clients' state, logs and checkpoints."""
