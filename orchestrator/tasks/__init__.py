"""Record dialects to one Task."""
