"""Faults of real systems as scenarios: each breaks a rule under the rules that had the hole, and none under ours."""
