"""A record as a file for another tool; one module each."""
