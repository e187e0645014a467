"""Upkeep that AReaL starts by name: `python -m aweagent.maintenance.NAME`."""
