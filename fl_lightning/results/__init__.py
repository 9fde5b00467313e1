"""What runs leave behind: summaries, comparisons, curves, and the papers' numbers."""
