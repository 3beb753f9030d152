"""An example service: an agent behind an HTTP API, held to limits."""
