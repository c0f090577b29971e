"""The sandbox host: gives boxes of this machine to clients elsewhere."""
