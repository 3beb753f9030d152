"""The rule that admits calls, and the decisions, texts and reasons that follow; no LangChain."""
