"""A TOML file becomes a frozen configuration, or a list of all its mistakes."""
