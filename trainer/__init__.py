"""The trainer: batches, losses, backends, weights and the loop."""
