"""Who edits the repository: one protocol, one module or package an agent."""
