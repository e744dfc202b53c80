"""Does accumulation reproduce the logical batch?

`catalogue` says what can be found, `judge` reads a watched loop, `run` starts the process that
computes. `worker` is that process: the only part that knows torch.
"""
