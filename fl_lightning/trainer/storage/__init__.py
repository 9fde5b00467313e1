"""The files of a run: folder, lock, checkpoints, clients' rows, provenance."""
