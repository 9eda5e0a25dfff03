"""What runs inside the sandbox: a program of its own, started as `python -I FOLDER`, without the rest of minips."""
