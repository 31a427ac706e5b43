"""Monte Carlo credit: values are mean rewards of continued prefixes."""
