"""The engines as the service sees them: who they are, who of them may have requests, what they report."""
