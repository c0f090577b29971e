"""A group as bytes: what goes into segment files and dumps, and over HTTP. Pure."""
