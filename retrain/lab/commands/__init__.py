"""Commands of the lab, registered as entry points."""
