"""Managed engines: their own environment, their command lines, and the processes."""
