"""One trial: the parent's side, the worker's side, and how it ended."""
