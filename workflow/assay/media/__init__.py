"""Media bytes in and out: strict decoders, which say what is wrong instead of playing what is left."""
