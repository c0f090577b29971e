"""The data half of a publish: how the trainer's weights travel."""
