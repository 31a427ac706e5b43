"""What can be known before a run: explanations, and checks that start workers, interpreters and engines."""
