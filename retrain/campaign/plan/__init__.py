"""Plan of a campaign: conditions x seeds from one TOML file."""
