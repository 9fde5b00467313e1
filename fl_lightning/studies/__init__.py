"""Studies: methods tuned alike, their rows, kept in a store, trained again, and what they say of the papers' claims."""
