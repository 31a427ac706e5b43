"""Studies of methods: testbed, credit audit, Monte Carlo credit, formula checks. No other package imports this one."""
