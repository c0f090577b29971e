"""Function calling as the Berkeley leaderboard has it: tools per task, and calls that are judged, not run."""
