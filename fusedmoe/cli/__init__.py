"""The ``fusedmoe`` command: one module per subcommand, and `main`, which chooses among them."""
