"""Where task code runs: one protocol, one module a backend."""
