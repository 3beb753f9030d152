"""What is served or exported: the page, metrics, and headers of HTTP."""
