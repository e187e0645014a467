"""The import surface AReaL expects. Importing it needs no dependency and has no effect."""
