"""What limits can do besides counting calls: each feature in its place."""
