"""The command line: one file per command. Heavy modules are only imported when a command runs."""
