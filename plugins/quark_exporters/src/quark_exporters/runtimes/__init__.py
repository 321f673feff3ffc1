"""What runtimes make of a checkpoint, by the rules of their readers: `rules.toml` has the rules, `inspector` applies them."""
