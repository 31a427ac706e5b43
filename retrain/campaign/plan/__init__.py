"""What a campaign runs: conditions x seeds from one TOML file."""
