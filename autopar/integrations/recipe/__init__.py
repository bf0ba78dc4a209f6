"""A training run from a TOML file, without a script: ``autopar run --config train.toml``."""
