"""References: the code that served output is judged against, one module per kind; and per modality, what it answers."""
