"""The tools of the built-in agent, one a file."""
