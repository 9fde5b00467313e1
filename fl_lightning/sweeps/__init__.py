"""Many runs: sweeps over settings, and the cells of the papers' tables."""
