"""One round: propose, verify, commit."""
