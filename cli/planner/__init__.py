"""`palestra plan`: rules and cost models over a run's configuration. Pure: no clock, no file, no network, no torch."""
