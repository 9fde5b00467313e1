"""What every room uses: flat vectors, named state, contexts, random streams, errors."""
