"""The command line: arguments, display and exit codes. No other layer knows the shell."""
