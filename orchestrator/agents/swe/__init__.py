"""The built-in tool-use loop over an OpenAI-compatible endpoint."""
