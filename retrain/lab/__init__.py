"""Studies of methods: the testbed, the credit audit, Monte Carlo credit, formula checks. Nothing else imports it."""
