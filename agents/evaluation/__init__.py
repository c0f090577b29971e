"""Evaluation: an environment played by a model n times k times, what is kept of it, and what the figures mean."""
