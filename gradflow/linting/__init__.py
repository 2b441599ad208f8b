"""``gradflow check FILE``: `architectures` reads a description, `lint` holds it against its scheme by `rules` and `constants`."""
