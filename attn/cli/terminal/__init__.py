"""What a user of the command line meets on every command: options, progress, threads."""
