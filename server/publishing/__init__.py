"""The control half of a weight publish, per transport."""
