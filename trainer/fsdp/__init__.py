"""A light training backend: any causal language model of transformers, sharded by torch's FSDP2."""
