"""How a cohort's uploads are combined: the mean, robust rules, differential privacy."""
