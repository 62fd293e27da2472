"""Sample sets: the fixed, hashed list of requests that every server of a family is sent."""
