"""Parts that algorithms are composed of: ascent, local and server optimizers, averaging, drift corrections."""
