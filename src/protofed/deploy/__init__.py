"""A real federation between machines, on Flower: keys, the server, the sites."""
