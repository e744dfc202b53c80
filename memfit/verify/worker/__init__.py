"""The process that computes: builds the user's model, runs it on real numbers, and compares.

Everything here imports torch at once, and nothing outside imports it: the parent starts it as
`python -m memfit.verify.worker FOLDER PIPE`.
"""
