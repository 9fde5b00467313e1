"""The command line: a file a subcommand."""
