"""Accuracy: what the virtual GPU says against what other people measured on real cards.

`python -m tests.accuracy --truth DIR --markdown reports/accuracy.md` runs every data set whose
files are in DIR and whose packages are installed, and writes the report.
"""
