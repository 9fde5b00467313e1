"""Real devices: the run stays on a server, and clients train on the nodes that hold their state.

`server` and `node` are the two ends. Any function that carries a `Message` to each node and back joins them; `app`
wraps them as Flower's apps. A node keeps its clients' states; the server knows which version of each state is valid.
"""
