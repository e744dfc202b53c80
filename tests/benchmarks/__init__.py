"""Benchmarks: plain commands, never collected as tests, and nothing here asserts a duration."""
