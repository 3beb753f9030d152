"""The feature behind `RepeatLimit`: calls that repeat earlier ones are refused."""
