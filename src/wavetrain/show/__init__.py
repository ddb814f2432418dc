"""What people and machines see of a value: tables for the terminal, documents for `--json`."""
