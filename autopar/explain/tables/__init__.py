"""Plans, verifications and machines as text for people."""
