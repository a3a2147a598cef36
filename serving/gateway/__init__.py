"""The gateway: from a client's request to a replica and back."""
