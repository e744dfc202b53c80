"""The items, by area; the modules are named in the order of the table."""
