"""`python -m memfit`."""

from memfit.cli import command

if __name__ == "__main__":
    command()
