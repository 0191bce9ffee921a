"""The command line: `main` finds the command, one module per command does the work.

A command module offers `add_arguments(parser)` and `run(args) -> exit code`. Everything heavy is imported
inside `run`, so that `octavo --help` and `octavo COMMAND --help` answer at once.
"""
