"""The ``fusedmoe`` command: `main`, and one module per subcommand."""
