"""Features: what limits can do besides counting calls, one file or folder for each."""
