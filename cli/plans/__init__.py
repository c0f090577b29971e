"""What `palestra plan` reads and writes; the plan itself is made in `cli/planner/`."""
