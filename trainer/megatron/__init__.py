"""Megatron-core behind the trainer's Backend: one process, fp32, on the CPU or one GPU."""
