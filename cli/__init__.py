"""The command line: one file per verb, the roles that a run consists of, and their launchers."""
