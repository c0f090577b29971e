"""The parts of `palestra eval`: options, the run, tables, comparison and rescoring."""
