"""Tasks of the experiments: published data sets and generated ones."""
