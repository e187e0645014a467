"""Rows, not rules: the only place with SQL."""
