"""The middlewares: the code that LangChain calls."""
