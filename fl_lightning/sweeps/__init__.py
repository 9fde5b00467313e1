"""Many runs: sweeps in W&B's format, their trials, and the papers' tables."""
