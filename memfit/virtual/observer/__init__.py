"""What `memfit run` puts into every Python process that it starts.

The folder stands first on PYTHONPATH: each interpreter loads its `sitecustomize`, which waits for
torch and then loads `watch`. Neither imports memfit, which the program's own interpreter need not
have.
"""
