"""A capacity plan: many probes, devices by settings, into one table."""
