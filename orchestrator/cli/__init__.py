"""The rollouts command: parse, call one function, render."""
