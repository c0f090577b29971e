"""Environments in which somebody talks back: a customer of a shop, or the other side of a bargain."""
