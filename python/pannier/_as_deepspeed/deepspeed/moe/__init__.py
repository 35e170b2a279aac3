"""Names of expert parallelism, which Pannier does not have."""
