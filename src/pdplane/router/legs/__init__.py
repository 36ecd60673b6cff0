"""The two legs of an attempt, one file per dialect."""
