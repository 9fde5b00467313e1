"""The command line: one file for each subcommand.

A subcommand is a module here with ``SUMMARY``, its line in ``fl-lightning --help``, and ``run``. The command line is
made of the parameters of ``run``:

- ``trainer``, ``model``, ``data``: built from the config.
- ``cli``: the `FederatedCLI` itself, for a command that builds trainers with settings of its own.
- Other parameters before a ``/`` are positional arguments, the rest options; types, defaults and help come from the
  annotations and the docstring.
"""
