"""The SSM worker: a small model that grows token trees for the LLM to verify."""
