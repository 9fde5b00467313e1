"""Real devices: the run stays on a server, and clients train on the nodes that hold their state.

`server` and `node` are the two ends, joined by any function that carries a `Message` to each node and back; `app` makes
Flower's apps of them. A node keeps its clients' states; the server knows of each client which version of it counts.
"""
