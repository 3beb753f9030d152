"""The rule that admits calls, and the decisions that follow. No LangChain in it."""
