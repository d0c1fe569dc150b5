"""The request manager: schedules steps, has trees drafted, merged and verified, and commits what the LLM said."""
