"""Processes, signals, precision, memory and the console of a run."""
