"""Where LangChain calls us."""
