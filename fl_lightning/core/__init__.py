"""Flat vectors, named state, contexts, random streams, errors: used by every room."""
