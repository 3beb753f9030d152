"""The kernel behind all middlewares, and LangChain's hooks that call it."""
