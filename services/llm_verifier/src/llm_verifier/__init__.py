"""The LLM verifier: decodes every node of a token tree in one forward pass and answers with the LLM's own tokens."""
