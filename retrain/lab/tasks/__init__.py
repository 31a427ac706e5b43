"""Tasks of the testbed; each has one premise."""
