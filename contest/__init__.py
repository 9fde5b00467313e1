"""The contestants of ``python -m contest``: ours, a plain loop, pfl and Flower, each in a process of its own."""
