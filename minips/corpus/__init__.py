"""Training examples from data sets: every builder turns rows into prefix, branches, prompt and target."""
