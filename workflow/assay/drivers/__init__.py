"""Programs that call a model's own package, in an environment of its own: nothing of ours is in it but `errors`."""
