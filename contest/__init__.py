"""The contestants of bench_engine.py: ours, a plain loop, pfl and Flower, each in a process of its own."""
