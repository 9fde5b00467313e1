"""Which clients take part in a round, and how they fail."""
