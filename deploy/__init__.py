"""What users touch: Serve application, OpenAI ingress, command line, metrics."""
