"""From a sandbox's work tree to a patch, and from a patch to a verdict with evidence."""
