"""What rounds and drafts cost, measured before requests are taken."""
