"""Walks SWE-bench rollouts through a persisted finite-state machine."""
