"""The report of runs: one HTML page that opens offline."""
