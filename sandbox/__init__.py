"""Runs code that nobody trusts: boxes, backends that make them, and a pool of warm ones."""
