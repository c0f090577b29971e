"""How a model and a batch are laid out over processes: words and rules. Pure; nothing heavy is imported."""
