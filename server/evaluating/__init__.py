"""Evaluations of a run that trains: what is due, on which weights, and what came of it, all of it files of the run's folder."""
