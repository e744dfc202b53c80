"""Training scripts as users of other trainers write them."""
