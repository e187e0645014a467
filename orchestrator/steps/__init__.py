"""What is done while a rollout is in state X: one module a state, plain data in and out."""
